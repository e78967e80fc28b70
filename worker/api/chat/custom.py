"""Custom tools, which take one text of a form of its own. Pure functions, any thread.

Templates know functions. So a model is told of a function with one argument, `INPUT`, and what it
writes as that argument is the text that the client gets. A call that is forced is held to the
text's form; of any other the model is only told the form.
"""

from __future__ import annotations

from typing import Literal

from worker.api.chat.request import INPUT, TextForm, Tool, ToolCall
from worker.api.http.body import OpenBody

_NOUNS = {"lark": "Lark grammar", "regex": "regular expression"}
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The text, and nothing else."}},
    "required": [INPUT],
    "additionalProperties": False,
}


class GrammarFields(OpenBody):
    """The form of a custom tool's text."""

    syntax: Literal["lark", "regex"]
    definition: str

    def form(self, path: str) -> TextForm:
        """The form, whose field is `path`."""
        return TextForm(self.syntax, self.definition, path)


def custom_tool(name: str, description: str | None, path: str, form: TextForm | None) -> Tool:
    """The tool whose fields `path` has; without a form, it takes any text."""
    told = [description or ""]
    if form is not None:
        told.append(f"Its `{INPUT}` follows this {_NOUNS[form.syntax]}:\n{form.definition}")
    words = "\n\n".join(filter(None, told)) or None
    return Tool(name, f"{path}.{INPUT}", words, _PARAMETERS, is_custom=True, form=form)


def custom_call(name: str, text: str, id: str | None) -> ToolCall:
    """A call of a custom tool in a conversation."""
    return ToolCall(name, {INPUT: text}, id)
