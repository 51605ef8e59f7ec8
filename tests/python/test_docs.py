"""Every Python snippet of docs/python.md runs, in order, in one namespace."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/python.md"


def test_F8_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert len(snippets) >= 4
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, DOCUMENT.name, "exec"), namespace)
    assert namespace["y"].shape == (10, 64)


def test_what_the_document_lists_exists():
    import mok

    text = DOCUMENT.read_text()
    for name in set(re.findall(r"(?<![.\w])mok\.(\w+)", text)) - {"models"}:
        assert hasattr(mok, name), name
    for name in mok.Options.__dataclass_fields__:
        assert f"`{name}`" in text, name
