r"""Final answers as text in one notation: LaTeX and Unicode become plain text such as `3sqrt(2)/4`.

Two normal forms, both of which only replace text: short_form follows the MATH data set
(arXiv:2103.03874), plain_form follows PRM800K (arXiv:2305.20050). Does not know what an expression
means; expression.py reads the plain form.
"""

from __future__ import annotations

import re
import unicodedata

from trigon.rewards.verifiers.expression import MAX_DEPTH, TooComplex

_UNITS = """degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"""
_UNIT = rf"(?:{'|'.join(_UNITS.split())})(?:es)?s?"
_UNIT_IN_TEXT = re.compile(rf"\\(?:text|mathrm|rm|mbox)\s*\{{[\s~]*{_UNIT}\s*\}}\s*(?:\^\s*\{{?[0-9]\}}?)?")
_PLAIN_UNIT = re.compile(rf"{_UNIT} *(?:\^(?:[0-9]+|\{{[0-9]+\}}))?")
_DEGREES = re.compile(r"\^ *(?:\\circ|\{ *\\circ *\})|[°º]|\\degrees?(?![a-zA-Z])")
_MAGNITUDES = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_SCRIPT_DIGITS = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, "0123456789-0123456789")
_CHARACTERS = str.maketrans(
    {
        **{"π": "pi", "∞": "inf", "∪": "U", "√": r"\surd ", "⁄": "/", "÷": "/"},
        **dict.fromkeys("·×⋅∙∗", "*"),
        **dict.fromkeys("−–－", "-"),
        **dict.fromkeys("△", ""),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
    }
)

_SYMBOLS = {
    **{"pi": "pi", "infty": "inf", "cup": "U", "cap": "∩", "cdot": "*", "times": "*", "ast": "*", "div": "/"},
    **{"le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠"},
    **{"lt": "<", "gt": ">", "pm": "±", "mp": "∓", "to": "→", "rightarrow": "→", "in": "∈", "notin": "∉"},
    **{"emptyset": "∅", "varnothing": "∅", "setminus": "∖", "mid": "|", "vert": "|", "angle": "∠"},
    **{"circ": "", "approx": "≈", "sim": "∼", "cong": "≅", "equiv": "≡", "perp": "⊥", "parallel": "∥"},
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "theta": "θ"},
    **{"lambda": "λ", "mu": "μ", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "varphi": "φ", "omega": "ω"},
    **{"Delta": "Δ", "Omega": "Ω", "Sigma": "Σ", "Phi": "Φ", "ldots": "...", "dots": "...", "cdots": "..."},
    **{"lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "langle": "<", "rangle": ">"},
}
"""Commands of LaTeX that stand for a symbol."""

_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp lim max min gcd lcm det"
_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)

# A denominator without parentheses, and a number that may be the integer of a mixed number.
_FACTOR = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]|pi|sqrt\([^()]*\)")
_BEFORE_MIXED = re.compile(r"(?:^|[^\w./)}\]])\d+ *$")
_MIXED = re.compile(r"(?<![\d./^_)])(\d+) +(\d+)/(\d+)(?![\d.])")


def short_form(answer: str) -> str:
    r"""Return an answer without its unit, its name and spaces: "x = \dfrac12" gives "\frac{1}{2}".

    Letter case and the order of terms remain.
    """
    answer = _without_text(answer.strip())
    answer = answer.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    answer = answer.replace("tfrac", "frac").replace("dfrac", "frac")
    answer = answer.replace(r"\left", "").replace(r"\right", "")
    answer = answer.replace(r"^{\circ}", "").replace(r"^\circ", "").replace(r"\$", "")
    answer = without_unit(answer).replace(r"\%", "").replace("%", "")
    answer = re.sub(r"(^|[ {])\.", r"\g<1>0.", answer)
    answer = without_name(answer)
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer.replace(" ", ""))
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    if answer == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", answer)


def plain_form(answer: str) -> str:
    r"""Return an answer as plain text in lower case: "\frac{\sqrt 3}{2} cm" gives "sqrt(3)/2".

    Units and spaces are removed. Braces enclose sets only. A mixed number has a "&" after its
    integer: "1&1/2".
    Raises: TooComplex if braces or commands are nested too deeply.
    """
    answer = _without_text(answer)
    answer = answer.replace(r"\%", "").replace(r"\$", "").replace("$", "").replace("%", "")
    answer = answer.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _MAGNITUDES.items():
        answer = answer.replace(word, factor)
    answer = re.sub(r"[¼-¾⅐-⅞]", lambda match: " " + unicodedata.normalize("NFKC", match[0]), answer)
    answer = re.sub(f"[{_SUPERSCRIPTS}]+", lambda match: f"^{{{match[0].translate(_SCRIPT_DIGITS)}}}", answer)
    answer = re.sub(f"[{_SUBSCRIPTS}]+", lambda match: f"_{{{match[0].translate(_SCRIPT_DIGITS)}}}", answer)
    answer = _PLAIN_UNIT.sub("", _UNIT_IN_TEXT.sub("", answer))
    answer = _DEGREES.sub("", answer).translate(_CHARACTERS)
    answer = re.sub(r", ?\\! *", "", answer).replace("{,}", ",")
    if r"\begin" not in answer:
        answer = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", answer)  # written with doubled backslashes
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = _LatexReader(answer).read()
    answer = re.sub(r"- +", "-", _MIXED.sub(r"\1&\2/\3", answer))
    answer = unicodedata.normalize("NFKC", "".join(answer.split())).lower()
    return answer.replace("**", "^").replace("<=", "≤").replace(">=", "≥")


def without_unit(answer: str) -> str:
    r"""Return an answer without the text after it: "5\text{ apples}" gives "5"."""
    parts = answer.split(r"\text{ ")
    return parts[0] if len(parts) == 2 else answer


def without_name(answer: str) -> str:
    """Return an answer without its name of at most two characters: "x=5" gives "5"."""
    name, equals, value = answer.partition("=")
    return value if equals and len(name) <= 2 and "=" not in value else answer


def _without_text(answer: str) -> str:
    r"""Return the content of "\text{...}" where that is the entire answer."""
    match = re.search(r"^\\text\{(.+?)\}$", answer)
    return match[1].strip() if match else answer


class _LatexReader:
    """Converts LaTeX to plain text. Commands that it does not know are omitted."""

    def __init__(self, latex: str) -> None:
        self._tokens: list[str] = _TOKEN.findall(latex)
        self._position = 0
        self._depth = 0

    def read(self) -> str:
        text = ""
        while self._position < len(self._tokens):
            text += self._read_until("}")
        return text

    def _next(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1]

    def _peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def _read_until(self, end: str) -> str:
        """Return the text up to a token, and move behind it."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooComplex(f"more than {MAX_DEPTH} nested groups")
        text = ""
        while self._position < len(self._tokens):
            token = self._next()
            if token == end:
                break
            text += self._convert(token, text)
        self._depth -= 1
        return text

    def _read_argument(self) -> str:
        while self._peek().isspace():
            self._position += 1
        if self._position == len(self._tokens):
            return ""
        token = self._next()
        return self._read_until("}") if token == "{" else self._nested_convert(token)

    def _nested_convert(self, token: str) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooComplex(f"more than {MAX_DEPTH} nested commands")
        text = self._convert(token, "")
        self._depth -= 1
        return text

    def _convert(self, token: str, before: str) -> str:
        """Return the text of a token and of its arguments. before: the text before it."""
        if token == "{":
            return self._read_until("}")
        if token in "^_":
            script = self._read_argument().strip()
            while token == "^" and script.isdigit() and self._peek().isdigit():  # 2^10 in plain text
                script += self._convert(self._next(), "")
            while self._peek() == " ":
                self._position += 1
            # x^2 3 is not x^23
            is_simple = re.fullmatch(r"-?\d+|[^\W\d_]", script) is not None and not self._peek().isdigit()
            return token + (script if is_simple else f"({script})") if script else ""
        if token == "~":
            return " "
        if not token.startswith("\\"):
            return token
        name = token[1:]
        if name in _FRACTIONS:
            return _fraction(self._read_argument().strip(), self._read_argument().strip(), before)
        if name in ("sqrt", "surd"):
            return self._root(takes_number=name == "surd")
        if name == "begin":
            return self._environment()
        if name in ("left", "right"):
            if self._peek() == ".":
                self._position += 1
            return ""
        if name in _SYMBOLS:
            return _SYMBOLS[name]
        if name in _NAMES.split():
            return name
        if name in ("quad", "qquad", ",", ";", ":", " ", "\\"):
            return " "
        return name if name in ("{", "}", "#", "&", "_", "|") else ""

    def _root(self, *, takes_number: bool) -> str:
        """Return "sqrt(2)". takes_number: whether the argument may be a number, as in √12."""
        while self._peek().isspace():
            self._position += 1
        if self._peek() == "[":
            self._position += 1
            degree = self._read_until("]")
            return f"root({degree},{self._read_argument()})"
        if self._peek() == "(":
            self._position += 1
            return f"sqrt({self._read_until(')')})"
        argument = self._read_argument()
        while takes_number and argument.isdigit() and (self._peek().isdigit() or self._peek() == "."):
            argument += self._next()
        return f"sqrt({argument})"

    def _environment(self) -> str:
        r"""Return "[1,2;3,4]" for "{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"."""
        environment = self._read_argument()
        if environment == "array":
            self._read_argument()
        text = ""
        while self._position < len(self._tokens):
            token = self._next()
            if token == r"\end":
                self._read_argument()
                break
            text += {"&": ",", "\\\\": ";"}.get(token) or self._nested_convert(token)
        return f"[{text}]"


def _fraction(numerator: str, denominator: str, before: str) -> str:
    r"""Return "a/b", with parentheses where the text needs them and \frac does not."""
    if re.search(r"(?<=.)[-+±]|[/,=]", _outside(numerator)):
        numerator = f"({numerator})"
    if not _FACTOR.fullmatch(denominator):
        denominator = f"({denominator})"
    fraction = f"{numerator}/{denominator}"
    last = before.rstrip()[-1:]
    if _BEFORE_MIXED.search(before) and re.fullmatch(r"\d+/\d+", fraction):
        return f" {fraction}"  # a mixed number
    is_joined = last in tuple("^/") or (fraction[0].isdigit() and (last.isalnum() or last in tuple(")]}.")))
    is_joined |= fraction[0] == "-" and last not in ("", *"([{,;=≤≥<>")
    return f"({fraction})" if is_joined else fraction


def _outside(text: str) -> str:
    """Return the characters of a text that are not in parentheses."""
    depth, outside = 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        outside += character if depth == 0 else ""
    return outside
