"""The page at /: one document that fetches nothing but this server's own figures and answers."""
import functools
import html
import pathlib

_FILES = pathlib.Path(__file__).parent / "assets"
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
          "form-action 'none'")


@functools.cache
def page(name):
    result = (_FILES / "page.html").read_text(encoding="utf-8")
    scripts = "\n".join(_asset(file) for file in ("charts.js", "prompt.js", "main.js"))
    for key, text in (("TITLE", html.escape(f"unshard: {name}")), ("NAME", html.escape(name)), ("STYLE", _asset("page.css")),
                      ("SCRIPT", scripts)):
        result = result.replace(f"@@{key}@@", text)
    return result


def _asset(name):
    return (_FILES / name).read_text(encoding="utf-8")
