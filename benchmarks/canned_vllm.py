"""A server that answers as vLLM does, with the same tokens each time, after some seconds.

It samples nothing, so that what is measured is the client. Standard library only.

    python benchmarks/canned_vllm.py PORT SECONDS TOKENS
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import ClassVar


def answer(tokens: int, logprobs: bool) -> bytes:
    """What vLLM says of a request for so many tokens."""
    content = [{"token": "token_id:7", "logprob": -1.2345678} for _ in range(tokens)]
    choice = {
        "token_ids": [7] * tokens,
        "logprobs": {"content": content} if logprobs else None,
        "finish_reason": "length",
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
    }
    return json.dumps({"choices": [choice], "usage": {}}).encode()


class Connection(asyncio.Protocol):
    """One client, whose requests come one after the other."""

    seconds: ClassVar = 0.0
    answers: ClassVar[dict[bool, bytes]] = {}
    probe = answer(1, False)

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        if not found or len(body) < int(fields.get(b"content-length", 0)):
            return
        self._received = b""
        last = fields.get(b"connection") == b"close"
        if b"/inference/" not in lines[0]:
            self._say(b"{}", last)
        elif b'"max_tokens": 1,' in body:  # whoever starts an engine tries it out
            self._say(self.probe, last)
        else:
            told = self.answers[b'"logprobs": 0' in body]
            asyncio.get_running_loop().call_later(self.seconds, self._say, told, last)

    def _say(self, body: bytes, last: bool) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        if last:
            self._transport.close()


async def serve(port: int, seconds: float, tokens: int) -> None:
    """Until the process is ended."""
    Connection.seconds = seconds
    Connection.answers = {asked: answer(tokens, asked) for asked in (False, True)}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
