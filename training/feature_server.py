"""A vLLM server with the plug-in, asked for the features of a sample: `features: server`.

The server runs a prompt of token ids and writes the residual of it into a folder that both see, under the name that
`feature_cache.py` gives the sample. The answer itself, one token, is not used.

    vllm serve TARGET --additional-config '{"hyperdflash_features": "FEATURES_DIR"}' ...      # docs/training.md
    .venv/bin/python -m pytest tests/test_feature_server.py
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2

from ..common.console import UsageError

TRIES, FIRST_WAIT = 5, 1.0  # of a request; seconds before the second, doubled at every further one
ANSWER_SECONDS = 600  # until a request is answered: the queue of a busy server
FILE_SECONDS = 12  # until the file of an answered request is seen; then it is asked for again
PASSING = (408, 429)  # and above 499: statuses of a server that is busy or starting


class FeatureServer:
    """One or more servers of the same target that write into the same folder; they share the samples.

    Args:
        urls (`list[str]`): `http://host:port`, with or without `/v1`.
    """

    def __init__(self, urls: list[str]):
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"features_server {url} is not an address: it must start with http:// or https://")
        self.urls = [url.rstrip("/").removesuffix("/v1") + "/v1" for url in urls]
        self._models: dict[str, str] = {}  # the name that each server has for the target
        self._client: tuple[int, httpx2.Client] | None = None

    def __str__(self) -> str:
        return ", ".join(self.urls)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_client": None}

    @property
    def client(self) -> httpx2.Client:
        """Of this process: a forked worker must not use its parent's connections."""
        if self._client is None or self._client[0] != os.getpid():
            # No proxy of the environment: the servers are machines of one's own
            limits = httpx2.Limits(max_connections=None)
            self._client = os.getpid(), httpx2.Client(timeout=ANSWER_SECONDS, limits=limits, trust_env=False)
        return self._client[1]

    def check(self, folder: Path) -> None:
        """Raises `OSError` unless all servers answer and one of them has made `folder`, the target's."""
        for url in self.urls:
            try:
                self._model(url)
            except httpx2.HTTPError as error:
                raise OSError(
                    f"features_server: no vLLM answers at {url} ({_describe(error)}). Start it as docs/training.md "
                    "says, or set on_missing: error to train from features_dir alone"
                ) from error
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} does not exist, so no server of this target writes there. Start vLLM for this target with "
                f'--additional-config \'{{"hyperdflash_features": "{folder.parent}"}}\', on a folder that both see '
                "(containers: --ipc=host, or the same mount)"
            )

    def _model(self, url: str) -> str:
        """The name that a server has for its target."""
        if url not in self._models:
            answer = self.client.get(f"{url}/models").raise_for_status()
            try:
                self._models[url] = answer.json()["data"][0]["id"]
            except (ValueError, LookupError, TypeError):
                raise httpx2.DecodingError(f"{url}/models lists no model") from None
        return self._models[url]

    def write(self, input_ids: Sequence[int], path: Path) -> None:
        """Have a sample's file written, and return once it is there.

        Raises `ValueError` for what a server refuses or could not write, `OSError` when no server answers, or when
        they answer and the file does not come.
        """
        problem = path.with_suffix(".error")
        problem.unlink(missing_ok=True)  # of an earlier try
        first = int(path.stem[:8], 16)  # each sample has its own server, and the next one where that fails
        for attempt in range(TRIES):
            for i in range(len(self.urls)):
                url = self.urls[(first + i) % len(self.urls)]
                reason = self._ask(url, input_ids)
                if reason is None:
                    if wait_for(path, problem):
                        return
                    reason = f"{url} answers, but {path} does not come: look at the server's log"
            if attempt < TRIES - 1:
                time.sleep(FIRST_WAIT * 2**attempt)
        raise OSError(f"features_server: {reason}, after {TRIES} tries. Resume when it is there again")

    def _ask(self, url: str, input_ids: Sequence[int]) -> str | None:
        """Let the server run the sample; returns what went wrong and may pass."""
        try:
            body = {"model": self._model(url), "prompt": list(input_ids), "max_tokens": 1, "temperature": 0}
            self.client.post(f"{url}/completions", json=body).raise_for_status()
        except httpx2.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 and status not in PASSING:
                raise ValueError(
                    f"features_server: a sample of {len(input_ids)} tokens is refused, {_describe(error)}"
                ) from error
            return _describe(error)
        except httpx2.HTTPError as error:
            return f"{url} does not answer: {_describe(error)}"


def _describe(error: httpx2.HTTPError) -> str:
    if isinstance(error, httpx2.HTTPStatusError):
        return f"{error.request.url} answers HTTP {error.response.status_code}: {error.response.text[:300].strip()}"
    return str(error) or type(error).__name__


def wait_for(path: Path, problem: Path) -> bool:
    """Whether the file comes in time; servers write after they answer. Raises `ValueError` with a server's reason."""
    deadline, pause = time.monotonic() + FILE_SECONDS, 0.002
    while not path.exists():
        if problem.exists():
            raise ValueError(f"the server did not write {path}: {problem.read_text(errors='replace')}")
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True
