"""An OpenAI-compatible server whose answers a test dictates, for `test_regenerate.py`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EOS, THINK_END = 1, 7  # of the tiny target's tokenizer


class FakeServer:
    """On `url`, in a thread. `reply(body)` gives status, payload (bytes are sent
    as they are) and headers, or None to hang up."""

    def __init__(self, tokenizer):
        self.tokenizer, self.requests, self.headers = tokenizer, [], []
        self.num_active = self.max_active = 0
        self.reply = self.echo
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def _handler(server):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send(200, {"data": [{"id": "v4"}]} if self.path == "/v1/models" else {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/completions"
                with server.lock:
                    server.requests.append(body)
                    server.headers.append(dict(self.headers))
                    server.num_active += 1
                    server.max_active = max(server.max_active, server.num_active)
                try:
                    answer = server.reply(body)
                finally:
                    with server.lock:
                        server.num_active -= 1
                if answer is not None:
                    self.send(*answer)

            def send(self, status, payload, headers=()):
                content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                self.send_response(status)
                for name, value in (*headers, ("Content-Length", str(len(content)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        return Handler

    def question(self, body) -> str:
        """The last user turn of a request."""
        return self.tokenizer.decode(body["prompt"]).rpartition("<｜User｜>")[2].partition("<｜Assistant｜>")[0]

    def spell(self, text: str) -> list[int]:
        """One token a character: not the ids that the tokenizer gives the text."""
        return [self.tokenizer.encode(character, add_special_tokens=False)[0] for character in text]

    def echo(self, body):
        """`Re: ` and the question, spelt, and EOS."""
        return choice(token_ids=[*self.spell(f"Re: {self.question(body)}"), EOS])

    def asked(self) -> list[str]:
        return [self.question(body) for body in self.requests]


def choice(status=200, headers=(), finish_reason="stop", **keys):
    return status, {"choices": [{"index": 0, "finish_reason": finish_reason, **keys}]}, headers
