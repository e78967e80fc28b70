"""Custom tools, which take one text of a form of its own. Pure functions, any thread.

Templates know functions. So a model is told of a function with one argument, `INPUT`, and what it
writes as that argument is the text that the client gets. A call that is forced is held to the
text's form; of any other the model is only told the form.
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
    """The tool whose fields `path` has; without a form, it takes any text."""
    told = [description or ""]
    if form is not None:
        told.append(f"Its `{INPUT}` follows this {_NOUNS[form.syntax]}:\n{form.definition}")
    words = "\n\n".join(filter(None, told)) or None
    return Tool(name, f"{path}.{INPUT}", words, _PARAMETERS, is_custom=True, form=form)
