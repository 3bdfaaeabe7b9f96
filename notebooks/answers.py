"""
The reader of answers: what a person has typed, as a value. A question says which kind it wants:

    number   13    thirteen    8 + 5 = 13    13 of 30    70x70    70²    1/2    68,7    64 GiB
    names    A and C    AC    all but B    only A passes    B and D fail    none    3 to 6    from 3 on
    series   [3, 6, 3]    3, then 6, then 3    step 0: 3, step 1: 6, step 2: 3
    truth    yes    No, longer    not shorter

Every word must be understood: "not 13", "13 or 14" and "at least 13" are Unreadable, not 13. The words
are in questions.toml, [talk].
"""
import ast
import math
import operator
import re
import tomllib
import unicodedata
from pathlib import Path

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
TALK = QUESTIONS.pop("talk")
UNITS, ONES, TENS = (TALK[name].split() for name in ("units", "ones", "tens"))
CLASSES = {word: kind for kind, words in TALK["classes"].items() for word in words.split()}
FILLERS = dict.fromkeys(TALK["fillers"].split(), "")
SPELLED = rf"\b(?:({'|'.join(TENS)})[ -]?)?({'|'.join(ONES)})\b|\b({'|'.join(TENS)})\b"
NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: pow,
              ast.Div: operator.truediv, ast.USub: operator.neg, ast.UAdd: operator.pos}
# A claim, in classes of words: Element, aLl, None, Rest, But, X not, V it is so, W it is not (v, w: "is:")
CLAIM = re.compile(r"(?P<verb>[vw]|X?(?:V+|W+))?(?P<no>X?)(?P<base>[LNR]?)(?P<names>E*)B?(?P<out>E*)"
                   r"(?P<after>X?(?:V+|W+)|X(?![LNRE]))?")


class Unreadable(ValueError):
    """It costs no attempt. The message says what to write."""


def readings(guess, it):
    """[value, ...]: what a guess may mean. A string among them is never right, and says why."""
    kinds = {bool: truth, str: names, list: series if it.get("ordered") else names}
    reader = kinds.get(type(it["answer"]), number)
    try:
        return reader(plain(guess), it)
    except (ValueError, ArithmeticError, SyntaxError, TypeError, LookupError, AttributeError, RecursionError):
        form = TALK["forms"][reader.__name__].format(*it.get("of", ""))
        raise Unreadable(f"I cannot read {str(guess)[:60]!r} as an answer. Write {form}.") from None


def plain(guess):
    """A guess as text: small letters, plain signs, digits for numbers in words."""
    guess = guess.tolist() if hasattr(guess, "tolist") else guess
    if isinstance(guess, dict):   # {"A": True, "B": False}, or {step: number}
        guess = [key if value is True else value for key, value in guess.items() if value is not False]
    if isinstance(guess, (list, tuple, set, frozenset, range)):
        return ", ".join(map(plain, guess)) or "none"
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", r"**\g<0>", str(guess)[:200])
    text = unicodedata.normalize("NFKC", text).lower()
    values = dict(zip([*ONES, *TENS], [*range(20), *range(20, 100, 10)]))
    text = re.sub(SPELLED, lambda found: str(sum(values.get(word, 0) for word in found.groups())), text)
    for word, times in ("hundred", 100), ("thousand", 1000):   # two hundred and five, 50 thousand
        text = re.sub(rf"\b(\d[\d.]*) {word}\b(?: (?:and )?(\d+)\b)?", lambda found: "%.0f" % (
            float(found[1]) * times + float(found[2] or 0)), text)
    for old, new in TALK["plain"]:
        text = re.sub(old, new, text)
    return text.strip()


def number(text, it):
    """In the question's unit, in each reading: "4,900" and "4.900" have two."""
    found = []
    for mark in ",_' ", ".":   # between thousands
        way = re.sub(rf"(?<=\d)[{mark}](?=\d{{3}}(?!\d))", "", text)
        try:   # all sides of 3 x 15 = 45 must agree
            sides = [calculated(each, it) for each in re.split(
                "[=:;]|->", re.sub(r"(?<=\d),(?=\d)", ".", way))]
            sides = [each for each in sides if each is not None]
            if all(each == sides[0] or math.isclose(each, sides[0], rel_tol=0.05) for each in sides):
                found += sides[-1:]
        except (SyntaxError, Unreadable):
            continue
    return found or calculated("unreadable", it)


def calculated(text, it):
    """The value of an expression in the question's unit. A sentence if it has another, None if empty."""
    code, units, loose = "", [], False
    for digits, word, sign in re.findall(rf"({NUMBER})|([a-z]+(?:-reduces?)?)|(\*\*|\S)", text):
        if digits or (word or sign) in TALK["signs"]:
            code += f" {float(digits)} " if digits else TALK["signs"][word or sign]
        elif unit := unit_of(word):
            code = code.removesuffix("/")   # GB/s
            units += [] if loose else [unit]
        elif (word or sign) not in FILLERS and word not in it.get("fillers", "").split():
            raise Unreadable
        loose |= code != "" and word in ("of", "for", "in")   # slots of finished rows
    if not code:
        return None
    value = folded(ast.parse(code.strip(), mode="eval").body)
    if not 0 <= value < math.inf:   # a difference below 0 is a range
        raise Unreadable
    wanted = it.get("unit", "number").split()
    sizes = next((each for each in TALK["sizes"] if wanted[0] in each), {})
    if sizes and value > 1e6 and not units:   # 68,719,476,736: nobody means GB
        units = ["b"]
    for unit in units:
        if unit not in sizes and unit not in wanted + it.get("per", "").split():
            return f"The question does not ask for {unit}s."
    return value * next((sizes[unit] / sizes[wanted[0]] for unit in units if unit in sizes), 1)


def unit_of(word):
    """A unit in the singular, or None."""
    unit = re.sub(r"(?<=ss)es$|(?<=[^s])s$", "", re.sub("ies$", "y", word)) if len(word) > 2 else word
    return unit if unit in UNITS or any(unit in sizes for sizes in TALK["sizes"]) else None


def folded(node):
    """The value of arithmetic with numbers, and of nothing else."""
    if isinstance(node, ast.Constant):
        return float(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(folded, parts))


def names(text, it):
    """{names}: what all claims say together. "B and D fail" is one claim, "A passes, B fails" are two."""
    order = [str(each).lower() for each in it["of"]]

    def span(found):   # 3 to 6, from 3 on
        at = {group: order.index(value) for group, value in found.groupdict().items() if value}
        end = at.get("high", at.get("below", len(order)) - 1) + 1
        return " ".join(order[at.get("low", at.get("after", -1) + 1):end])
    text = re.sub(r"\b(?:first|last)(?: (\d+))?\b", lambda found: " ".join(
        order[:int(found[1] or 1)] if found[0][0] == "f" else order[-int(found[1] or 1):]), text)
    for pattern in TALK["spans"]:
        text = re.sub(pattern.replace("NAME", rf"\b(?:{'|'.join(order)})\b"), span, text)
    kinds = FILLERS | CLASSES | dict.fromkeys(order, "E")
    for words, kind in zip(TALK["asks"][it["asks"]], "VW"):
        kinds |= dict.fromkeys(words.split(), kind)
    classes, said = "", []
    for word, colon, other in re.findall(r"(\d+|[a-z]+)(?: *(:))?|([^\w\s,;.:&/+!?()'-])", text):
        letters = [word] if word in kinds or not {*word} <= {*order} else [*word]   # AC
        unknown = "E" if word.isdigit() and order[0].isdigit() else "" if unit_of(word) else None
        for each in letters:
            kind = kinds.get(each, unknown)
            classes += kind.lower() if colon and kind in "VW" else kind   # TypeError if it is None
            said += [each] * len(kind)
    return [claimed({*order}, classes, said)]


def claimed(every, classes, said):
    """The names that are so, of all claims. Those that are only said not to be leave the others."""
    is_so, is_not, some = set(), set(), False
    for claim in CLAIM.finditer(classes):
        inner, out = ({*said[slice(*claim.span(group))]} for group in ("names", "out"))
        verbs = "".join(filter(None, claim.group("verb", "no", "after"))).lower()
        negative = (verbs.count("x") + ("w" in verbs)) % 2
        if claim["base"]:
            inner, out = {"L": every - out, "N": out, "R": every - is_so - is_not}[claim["base"]], set()
        elif not inner and claim["after"]:   # A passes, but B fails
            inner, out = out, set()
        if negative and not (inner or claim["base"] or out):
            raise Unreadable
        (is_not if negative else is_so).update(inner)
        is_not |= out   # all pass, but B
        some |= bool(inner or claim["base"]) and not negative
    if is_so & is_not and "L" not in classes or not some and not is_not and "N" not in classes:
        raise Unreadable
    return is_so - is_not if some else every - is_not


def series(text, it):
    """[[number, ...]] in order."""
    text = re.sub(r"(?:^|(?<=[,;]))\s*(?:[a-z]+ ?)?\d+ *(?:->|:) *(?=\d+[^\d>]*(?:[,;]|$))", " ", text)
    text = re.sub(r"\b[a-z](?=\d)", "", text)   # C3
    if re.search(r"[^\w\s,;/>|.&()-]|(?:^|[,;] *)-\d", text) or any(
            word not in FILLERS and not unit_of(word) for word in re.findall("[a-z-]*[a-z]", text)):
        raise Unreadable
    found = re.findall(NUMBER, text)
    return [[*map(float, text if len(found) == 1 and len(text) > 2 and text.isdigit() else found)]]


def truth(text, it):
    """Yes or no; all words that say so must agree."""
    kinds = FILLERS | {"not": "X"} | {word: kind for name, words, kind in zip(("yes", "no"), it["asks"], "VW")
                                      for word in (TALK[name] + " " + words).split()}
    found = re.findall("X?[VW]|X", "".join(kinds[word] for word in re.findall(r"[a-z]+|\d", text)))
    [value] = {("X" in each) == ("W" in each) for each in found}   # ValueError if they differ
    return [value]
