"""One line per logged step, and on a terminal a progress bar."""

import time

from transformers.trainer_callback import ProgressCallback


class StepLog(ProgressCallback):
    """`step 120/1500  loss 2.31  ce 2.10  kl 1.40  expected 2.45  lr 1.8e-03  12,300 tok/s  left 0:12:30`."""

    def on_train_begin(self, args, state, control, **kwargs):
        # Without a bar, the base class's methods would update `training_bar`, which is None
        self.shows_bar = not args.disable_tqdm
        self.start_time, self.start_step = time.perf_counter(), state.global_step
        if self.shows_bar:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        if self.shows_bar:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args, state, control, **kwargs):
        if not args.disable_tqdm:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        if self.shows_bar:
            super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            done = max(state.global_step - self.start_step, 1)  # of this process: a resumed run did not do the rest
            left = (time.perf_counter() - self.start_time) / done * (state.max_steps - state.global_step)
            line = train_line(state.global_step, state.max_steps, logs, left)
        elif any(name.startswith("eval_") for name in logs):
            line = eval_line(state.global_step, logs)
        else:  # the totals at the end of training
            return
        if self.training_bar is not None:
            self.training_bar.write(line)  # above the bar, which stays the last line
        else:
            print(line, flush=True)


def train_line(step: int, max_steps: int, logs: dict, seconds_left: float) -> str:
    hours, minutes = divmod(int(seconds_left) // 60, 60)
    empty = logs.get("batches_without_targets")
    return (
        f"step {step}/{max_steps}  loss {logs['loss']:.4f}  ce {logs['ce']:.4f}  kl {logs['kl']:.4f}  "
        f"expected {logs['expected_acceptance_length']:.3f}  lr {logs['learning_rate']:.1e}  "
        f"{logs['tokens_per_second']:,.0f} tok/s  "
        f"left {hours}:{minutes:02d}:{int(seconds_left) % 60:02d}"
        + (f"  {empty} batches without targets" if empty else "")
    )


def eval_line(step: int, logs: dict) -> str:
    decoded = logs.get("eval_acceptance_length")
    accuracy = [value for name, value in logs.items() if name.startswith("eval_slot_accuracy_")]
    return (
        f"evaluation at step {step}  loss {logs['eval_loss']:.4f}  "
        f"expected {logs['eval_expected_acceptance_length']:.3f}"
        + (f"  decoded {decoded:.3f}" if decoded is not None else "")
        + "  slots "
        + " ".join(f"{value:.2f}" for value in accuracy)
    )
