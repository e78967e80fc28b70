"""What chat templates of Hugging Face have beside Jinja's own syntax."""

from __future__ import annotations

import jinja2.ext
import jinja2.nodes
import jinja2.parser


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; only its body
    is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


EXTENSIONS = (GenerationTag, "jinja2.ext.loopcontrols")
