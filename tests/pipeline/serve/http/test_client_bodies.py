"""Bodies as clients send them: recorded from openai, LangChain, LiteLLM, LlamaIndex and the Vercel AI SDK.

`client_bodies.jsonl` has one a line: plain chats, chats with tools and with JSON, loops with results of tools. Those
marked `(source)` were written after the published source of the client, because it could not be run here.
"""

import json
from pathlib import Path
from typing import Any

from serving_doubles import MODEL, ScriptedEngine, run_http_server

BODIES = Path(__file__).with_name("client_bodies.jsonl")


def test_every_body_is_answered():
    refused = []
    with run_http_server(ScriptedEngine()) as served, served.client() as client:
        for line in BODIES.read_text(encoding="utf-8").splitlines():
            sent: dict[str, Any] = json.loads(line)
            answer = client._client.post(served.url + sent["path"], json={**sent["body"], "model": MODEL})
            ended = "data: [DONE]" in answer.text if sent["body"].get("stream") else "usage" in answer.text
            if answer.status_code != 200 or not ended:
                refused.append((sent["client"], answer.text[:300]))
    assert not refused
