"""The Jinja template of data.format_prompt, which is applied to the question of every row."""

from __future__ import annotations

from pathlib import Path

from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trigon.config.paths import is_inline_template
from trigon.data.templates import TemplateFailure, bounded_rendering, check_template
from trigon.errors import ConfigError
from trigon.system.suggestions import nearest


def load_format_prompt(format_prompt: str) -> Template:
    """Return the compiled template, after rendering it once.

    format_prompt: a file name, or, if it contains {{ or {%, the template itself. Its one variable
    is `content`.
    Raises: ConfigError naming the file, line or unknown variable.
    """
    source, where = format_prompt, "data.format_prompt"
    if not is_inline_template(format_prompt):
        source, where = _read(format_prompt), f"data.format_prompt={format_prompt}"
    check_template(source, where)
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        with bounded_rendering():
            variables = meta.find_undeclared_variables(environment.parse(source))
            template = environment.from_string(source.strip())
        if variables != {"content"}:
            found = ", ".join(sorted(variables)) or "no variable"
            raise ConfigError(
                f"{where} uses {found}; it must use the one variable {{{{ content }}}}, the row's question"
            )
        with bounded_rendering():
            template.render(content="question")
    except TemplateFailure as error:
        line = "" if error.line is None else f" in line {error.line}"
        raise ConfigError(f"{where} is not a usable Jinja template: {error}{line}") from error
    return template


def _read(name: str) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, sorted(entry.name for entry in folder.iterdir()))
    hint = f"did you mean {folder / near}?" if near else "give a file, or a template with {{ content }}"
    raise ConfigError(f"data.format_prompt: there is no file {name!r}; {hint}")
