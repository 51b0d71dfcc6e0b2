"""A client of an OpenAI-compatible server, which times the tokens of a streamed completion."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class Refused(Exception):
    """The server has answered, and not with what was asked for. One sentence."""


@dataclass(frozen=True)
class Answer:
    """One streamed completion. Seconds are from sending the request: to the first token, and to the last."""

    ttft_s: float
    total_s: float
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt; None: a server without `--enable-prompt-tokens-details` does not say."""


class Client:
    """Each call has a connection of its own, on any thread. Raises Refused, OSError, http.client.HTTPException."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`url`: http or https, without a path. A key for the server is taken from OPENAI_API_KEY."""
        self._parts = urlsplit(url)
        self._timeout_s = timeout_s

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self.send(method, path, body))

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """What is answered, whole."""
        connection = self._connect()
        try:
            return self._request(connection, method, path, body).read()
        finally:
            connection.close()

    def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Complete `prompt` (token ids) greedily with exactly `max_tokens` tokens."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        connection = self._connect()
        try:
            begun = time.perf_counter()
            response = self._request(connection, "POST", "/v1/completions", body)
            first_s, usage = 0.0, None
            token_ids: list[int] = []
            while line := response.readline():
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise Refused(f"the server aborted the response: {event['error']}")
                first_s = first_s or (time.perf_counter() - begun if event["choices"] else 0.0)
                token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                usage = event.get("usage") or usage
        finally:
            connection.close()
        if not first_s or not usage:
            raise Refused("the server ended the response before its last token")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Answer(first_s, time.perf_counter() - begun, tuple(token_ids), usage["prompt_tokens"], cached)

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)

    @staticmethod
    def _request(
        connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = " ".join(response.read(500).decode("utf-8", "replace").split())
            raise Refused(f"{method} {path} answered {response.status}: {text}")
        return response
