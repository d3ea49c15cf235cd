"""The client of docs/serve.md receives a response from the server of docs/serve.md."""

import re
from pathlib import Path

import pytest
from places import ROOT
from serving_process import server_process

PAGE = ROOT / "docs" / "serve.md"


@pytest.mark.slow
def test_the_documented_client_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("openai")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with server_process(tmp_path, "--port", 0, "--learn", "off") as server:
        assert "http://127.0.0.1:8000" in block
        exec(block.replace("http://127.0.0.1:8000", server.url), {})
        assert len(capsys.readouterr().out) > 20
        assert server.end() == 0
