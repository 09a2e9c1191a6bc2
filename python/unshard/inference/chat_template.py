"""A model's chat template: Jinja source that comes with the model, so it runs in the sandbox, with what Hugging Face gives to it."""
import datetime
import json


class ChatTemplateError(ValueError):
    """The messages don't suit the template, or the template is broken."""


class ChatTemplate:
    """Renders like `apply_chat_template(messages, add_generation_prompt=True)`; without importing transformers, which takes seconds."""

    def __init__(self, source, special_tokens):
        self._source, self._special_tokens, self._compiled = source, special_tokens, None

    def render(self, messages, /, **options):
        """messages: [{"role", "content", ...}]. options: further names that the template may read (`enable_thinking`, ...)."""
        import jinja2
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            names = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
            return self._compiled.render(**{**self._special_tokens, **options, **names})
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error


def _environment():
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks what the assistant says, for training; here it only passes its content on."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    result = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                          extensions=[Generation, jinja2.ext.loopcontrols])
    result.filters["tojson"] = tojson
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return result
