r"""Final answers as text in one notation: LaTeX and Unicode become plain text such as `3sqrt(2)/4`.

The plain form follows PRM800K (arXiv:2305.20050), and only replaces text. Does not know what an
expression means; expression.py reads the plain form.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from html.entities import html5

from trigon.rewards.verifiers.expression import MAX_DEPTH, TooComplex

_UNITS = """degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"""
_UNIT = rf"(?:{'|'.join(_UNITS.split())})(?:es)?s?"
_UNIT_IN_TEXT = re.compile(rf"\\(?:text|mathrm|rm|mbox)\s*\{{[\s~]*{_UNIT}\s*\}}\s*(?:\^\s*\{{?[0-9]\}}?)?")
_PLAIN_UNIT = re.compile(rf"{_UNIT} *(?:\^(?:[0-9]+|\{{[0-9]+\}}))?")
_DEGREES = re.compile(r"(?:\^|(?<=\d)) *(?:\\circ(?![a-zA-Z])|\{ *\\circ *\})|[°º]|\\degrees?(?![a-zA-Z])")
_MAGNITUDES = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_SCRIPTS = str.maketrans(_SUPERSCRIPTS + _SUBSCRIPTS, "0123456789+-()ni0123456789")
_CHARACTERS = str.maketrans(
    {
        **{"π": "pi", "∞": "inf", "∪": "U", "√": r"\surd ", "⁄": "/", "÷": "/"},
        **dict.fromkeys("·×⋅∙∗", "*"),
        **dict.fromkeys("−–－", "-"),
        **dict.fromkeys("△", ""),
        **dict.fromkeys("∶", ":"),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
    }
)

_SYMBOLS = {
    **{"cdot": "*", "ast": "*", "infty": "∞", "to": "→", "neq": "≠", "leqslant": "≤", "geqslant": "≥"},
    **{"lt": "<", "gt": ">", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "|": "‖"},
    **{"land": "∧", "lor": "∨", "lnot": "¬", "neg": "¬", "exists": "∃", "implies": "⇒", "circ": "∘", "colon": ":"},
    **{"ldots": "...", "dots": "...", "cdots": "...", "triangle": "", "deg": "deg", "sup": "sup", "epsilon": "ε"},
    **{"lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "langle": "<", "rangle": ">"},
}
"""Commands of LaTeX that stand for a symbol, where the entities of HTML lack it or differ."""

_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp lim max min gcd lcm det"
_STYLES = """text textrm textbf textit textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mathbb mathcal
mathscr mathfrak mathnormal mathop operatorname boldsymbol bm pmb rm bf it sf tt mbox hbox fbox boxed emph underline
ensuremath displaystyle textstyle scriptstyle limits nolimits middle big Big bigg Bigg bigl bigr Bigl Bigr
biggl biggr Biggl Biggr small normalsize large Large huge Huge !"""
"""Commands that change how their argument, or what follows, looks, but not what it means."""

_SPACES = ("quad", "qquad", "space", "enspace", "thinspace", ",", ";", ":", " ", "\\")
_ACCENTS = {
    **{"vec": "\u20d7", "overrightarrow": "\u20d7", "hat": "\u0302", "widehat": "\u0302", "bar": "\u0304"},
    **{"overline": "\u0304", "tilde": "\u0303", "widetilde": "\u0303", "dot": "\u0307", "ddot": "\u0308"},
}
"""Commands that mark a letter, and the combining character that does the same."""

_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
_BINOMIALS = ("binom", "dbinom", "tbinom")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)

OR = "\ue000"
"""What stands for "or" between values: a character that no answer has."""

_DELIMITERS = re.compile(r"\\(?:left|right)(?![a-zA-Z])\.?")
_OR_AND = re.compile(r"\\(?:text|mathrm|mbox|textbf|rm)\s*\{\s*(or|and)\s*\}|(?<= )(or|and)(?= )")
_ROOTS = re.compile(r"=|±|\\pm(?![a-zA-Z])")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_SEPARATED_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|, ?\\!) *(?=\d{3}(?!\d))")
_BRACKET = re.compile(
    r"([(\[]|\\\{|\\[lL]?(?:brace|brack|angle)(?![a-zA-Z])|[)\]]|\\\}|\\r(?:brace|brack|angle)(?![a-zA-Z]))"
)
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot) *(?:\{ *(\d+) *\}|(\d))(?!\d*\\dot)"
    r"|\\dot *\{? *(\d) *\}?(\d*)\\dot *\{? *(\d) *\}?)"
)
_MAX_REPEATING_DIGITS = 60
_NOT_EQUIVALENT = ("<circle>", "<square>", "<fraction>", "<super>", "<sub>")  # ① is not 1, and xᵃ is not xa

# A denominator without parentheses, and a number that may be the integer of a mixed number.
_FACTOR = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]|pi|sqrt\([^()]*\)")
_BEFORE_MIXED = re.compile(r"(?:^|[^\w./)}\]])\d+ *$")
_MIXED = re.compile(r"(?<![\d./^_)])(\d+) +(\d+)/(\d+)(?![\d.])")


def plain_form(answer: str) -> str:
    r"""Return an answer as plain text in lower case: "\frac{\sqrt 3}{2} cm" gives "sqrt(3)/2".

    Units and spaces are removed. Braces enclose sets only. A mixed number has a "&" after its
    integer: "1&1/2".
    Raises: TooComplex if braces or commands are nested too deeply.
    """
    answer = without_text(answer)
    answer = re.sub(r"(?<!\\)\\[()\[\]]|\\?[$%]", "", answer)
    answer = _joined_repeating(join_thousands(answer))
    for word, factor in _MAGNITUDES.items():
        answer = answer.replace(word, factor)
    answer = re.sub(r"[¼-¾⅐-⅞]", lambda match: " " + unicodedata.normalize("NFKC", match[0]), answer)
    answer = re.sub(f"[{_SUPERSCRIPTS}]+", lambda match: f"^{{{match[0].translate(_SCRIPTS)}}}", answer)
    answer = re.sub(f"[{_SUBSCRIPTS}]+", lambda match: f"_{{{match[0].translate(_SCRIPTS)}}}", answer)
    answer = _PLAIN_UNIT.sub("", _UNIT_IN_TEXT.sub("", _DEGREES.sub("", answer))).translate(_CHARACTERS)
    if r"\begin" not in answer:
        answer = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", answer)  # written with doubled backslashes
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = _LatexReader(_DELIMITERS.sub("", answer)).read()
    answer = re.sub(r"- +", "-", _MIXED.sub(r"\1&\2/\3", answer))
    answer = _normalize_characters("".join(answer.split()))
    return answer.replace("**", "^").replace("<=", "≤").replace(">=", "≥")


def join_values(*answers: str) -> list[str]:
    """Return answers to one question with a comma for "and" between values, and OR for "or".

    Where one of them names roots, "or" is a comma too: "x=1 or x=2" is the list "1, 2", and
    "2 or -2" is ±2.
    """
    words = {"and": " , ", "or": " , " if any(map(_ROOTS.search, answers)) else f" {OR} "}
    return [_OR_AND.sub(lambda match: words[match[1] or match[2]], answer) for answer in answers]


def join_thousands(answer: str) -> str:
    r"""Return an answer without the separators of thousands: "1,234" and "1{,}234" give "1234".

    Within brackets, and before a space, a comma separates elements: "(0,100)" and "1, 234" remain.
    """
    text, depth = "", 0
    for piece in _BRACKET.split(_SEPARATED_THOUSANDS.sub("", answer)):
        if _BRACKET.fullmatch(piece):
            is_closing = piece in (")", "]", r"\}") or piece.startswith(r"\r")
            depth = max(0, depth - 1) if is_closing else depth + 1
        elif depth == 0:
            piece = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), piece)
        text += piece
    return re.sub(r", ?\\! *", ",", text).replace("{,}", ",")


def after_name(answer: str) -> str:
    """Return what follows the last "=": "x = 2 + 3 = 5" gives " 5".

    An answer of several equations, such as "x = 1 or x = 2", is returned unchanged.
    """
    before, _, value = answer.rpartition("=")
    between = before.rpartition("=")[2] if "=" in before else ""
    return answer if re.search(r"[,;]|\bor\b|\band\b", between) else value


def without_unit(answer: str) -> str:
    r"""Return an answer without the text after it: "5\text{ apples}" gives "5".

    "1\text{ or }2" remains: it names several values.
    """
    value, _, text = answer.partition(r"\text{ ")
    is_unit = re.fullmatch(r"[^{}\d]*\}[\s.$]*(?:\^\s*\{?\d\}?)?[\s.$]*", text) is not None
    return value if value.strip() and is_unit and not re.search(r"\b(?:or|and)\b", text) else answer


def without_name(answer: str) -> str:
    """Return an answer without its name of at most two characters: "x=5" gives "5"."""
    name, equals, value = answer.partition("=")
    return value if equals and len(name) <= 2 and "=" not in value else answer


def without_text(answer: str) -> str:
    r"""Return the content of "\text{...}" where that is the entire answer."""
    match = re.search(r"^\\text\{(.+?)\}$", answer)
    return match[1].strip() if match else answer


def _joined_repeating(answer: str) -> str:
    r"""Return repeating decimals as fractions: "0.\overline{3}" gives "\frac{1}{3}"."""

    def fraction(match: re.Match[str]) -> str:
        integer, fixed = match[1] or "0", match[2]
        repeated = match[3] or match[4] or match[5] + match[6] + match[7]
        if len(integer) + len(fixed) + len(repeated) > _MAX_REPEATING_DIGITS:
            return match[0]
        value = Fraction(f"{integer}.{fixed}0") + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)

    return _REPEATING.sub(fraction, answer)


def _normalize_characters(text: str) -> str:
    """Return a text in lower case, with full-width digits and styled letters as plain ones.

    Greek capitals remain, since Ω is not ω.
    """
    characters = []
    for character in text:
        kind = "" if character.isascii() else unicodedata.decomposition(character).partition(" ")[0]
        if kind and kind not in _NOT_EQUIVALENT and unicodedata.category(character) != "No":
            character = unicodedata.normalize("NFKC", character)
        characters.append(character if "Α" <= character <= "Ω" else character.lower())
    return unicodedata.normalize("NFC", "".join(characters))


def _symbol(name: str) -> str:
    """Return the character of a command, or its name in backquotes, which no expression has."""
    if name in _SYMBOLS:
        return _SYMBOLS[name].translate(_CHARACTERS)
    character = html5.get(f"{name};", "")
    return f"`{name}`" if len(character) != 1 or character.isascii() else character.translate(_CHARACTERS)


class _LatexReader:
    """Converts LaTeX to plain text. A command that it does not know is an opaque symbol."""

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
        if name in _STYLES.split():
            return ""
        if name in _NAMES.split() or name in ("{", "}", "#", "&", "_"):
            return name
        if name.isspace() or name in _SPACES:
            return " "
        if name in _BINOMIALS:
            return f"binom({self._read_argument().strip()},{self._read_argument().strip()})"
        if name in _ACCENTS:
            return self._accent(name)
        symbol = _symbol(name)
        while symbol.startswith("`") and self._peek() == "{":
            symbol += f"({self._read_argument().strip()})"
        return symbol

    def _accent(self, name: str) -> str:
        r"""Return the letter with its mark; for "\overline{AB}", a segment, "AB"."""
        argument, mark = self._read_argument().strip(), _ACCENTS[name]
        if name == "overline" and re.fullmatch("[A-Z]{2,}", argument):
            return argument
        return argument + mark if len(argument) == 1 and argument.isalpha() else f"{mark}({argument})"

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
        r"""Return "[1,2;3,4]" for "{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}".

        Others have their name before them, as "vmatrix[1,2;3,4]".
        """
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
        name = "" if environment in _MATRICES else "‖" if environment == "Vmatrix" else environment
        return f"{name}[{text}]"


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
