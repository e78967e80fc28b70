"""Custom tools, which take one text, of a given form or any. Pure functions, any thread.

Chat templates only know functions. So the model sees a function with one parameter, `INPUT`, and
the client gets that argument as the tool's text. A call in JSON that a grammar covers, which is a
forced one or one beside a schema, is held to the form; for any other call the function's
description only states it.
"""

from __future__ import annotations

from worker.api.chat.request import INPUT, TextForm, Tool

_NOUNS = {"lark": "Lark grammar", "regex": "regular expression"}
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The text, and nothing else."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None, path: str, form: TextForm | None) -> Tool:
    """The tool that the request defines at `path`; without a form, it takes any text."""
    parts = [description or ""]
    if form is not None:
        parts.append(f"Its `{INPUT}` follows this {_NOUNS[form.syntax]}:\n{form.definition}")
    text = "\n\n".join(filter(None, parts)) or None
    return Tool(name, f"{path}.{INPUT}", text, _PARAMETERS, is_custom=True, form=form)
