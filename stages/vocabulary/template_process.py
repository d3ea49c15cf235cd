"""Chat templates are programs of others: they are rendered in a process of their own.

That process has a limit of memory, and is ended when a template passes its time limit: neither loops nor one huge value
reach the process that decodes. It inherits few variables of the environment, and answers with text alone.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from store.child import CallError, ChildCalls, ChildError, limit_memory

MEMORY_BYTES = 512 << 20  # beyond what it needs without any template
INHERITED = ("PATH", "HOME", "TZ", "LANG", "LD_LIBRARY_PATH")  # variables of the environment; no keys


class TemplateError(Exception):
    """A template that raised an error, or passed a limit."""


class TemplateProcess:
    """Renders templates in another process. May be used from any thread; a fork of this process has one of its own."""

    def __init__(self) -> None:
        self.calls = ChildCalls(_make_renderer, name="templates", variables=INHERITED)

    def render(self, template: str, values: Mapping[str, Any], seconds: float) -> str:
        """Render a template as `transformers` does, with these values: messages, tools, names of special tokens, and
        those of a request. Raises `TemplateError` if the template raised an error, took more than `seconds`, or too
        much memory.
        """
        try:
            text, failure = self.calls.call((template, json.dumps(dict(values), default=str)), seconds)
        except TimeoutError:
            raise TemplateError(f"it took more than {seconds:g} s") from None
        except CallError as error:
            raise TemplateError(str(error)) from None
        except ChildError as ended:
            raise TemplateError(f"{ended}; perhaps the template takes too much memory") from None
        if failure:
            raise TemplateError(failure)
        return str(text)


def _make_renderer() -> Callable[[tuple[str, str]], tuple[str, str]]:
    """Return what renders a template; runs in the process that renders, whose memory it limits."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: tuple[str, str]) -> tuple[str, str]:
        template, values = request[0], json.loads(request[1])
        try:
            values = {"add_generation_prompt": True, **values}
            rendered: Any = render_jinja_template([values.pop("messages")], chat_template=template, **values)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any error
            lines = str(error).strip().splitlines()
            return "", lines[0] if lines else type(error).__name__
        return rendered[0][0], ""

    render(("", '{"messages": []}'))  # loads what it needs
    limit_memory(MEMORY_BYTES)
    return render


TEMPLATES = TemplateProcess()  # one for all templates of this process
