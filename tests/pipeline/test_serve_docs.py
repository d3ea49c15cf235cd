"""The client of docs/serve.md, as it stands there, gets an answer from the server of docs/serve.md."""

import re
from pathlib import Path

import pytest
from serving_process import server_life

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"


def test_the_documented_client_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("openai")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with server_life(tmp_path, "--port", 0, "--learn", "off") as server:
        assert "http://127.0.0.1:8000" in block
        exec(block.replace("http://127.0.0.1:8000", server.url), {})
        assert len(capsys.readouterr().out) > 20
        assert server.end() == 0
