"""The page at /: one document that fetches nothing but this server's own figures and answers."""
import functools
import html
import pathlib

_FILES = pathlib.Path(__file__).parent / "assets"
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
          "form-action 'none'")


@functools.cache
def page(name):
    return _filled("page.html", name, "charts.js", "prompt.js", "main.js")


@functools.cache
def embeddings_page(name):
    """Of a server that has an embedding model only."""
    return _filled("embeddings.html", name, "embeddings.js")


def _filled(file, name, *scripts):
    result = _asset(file)
    scripts = "\n".join(map(_asset, scripts))
    for key, text in (("TITLE", html.escape(f"unshard: {name}")), ("NAME", html.escape(name)), ("STYLE", _asset("page.css")),
                      ("SCRIPT", scripts)):
        result = result.replace(f"@@{key}@@", text)
    return result


def _asset(name):
    return (_FILES / name).read_text(encoding="utf-8")
