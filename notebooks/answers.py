"""
The reader of answers: what a person has typed, as a value. A question says which kind it wants:

    number   13    thirteen    8 + 5 = 13    13 of 30    70x70    70²    1/2    68,7    64 GiB
    names    A and C    AC    all but B    only A passes    B and D fail    none    from 3 on
    series   [3, 6, 3]    3, then 6, then 3    step 0: 3, step 1: 6, step 2: 3
    truth    yes    No, longer    not shorter

A word that may change what is meant makes it Unreadable: "not 13" and "13 or 14" are not 13. Other
unknown words are ignored, but not among names, and not behind a number: "13 bananas".
"""
import ast
import math
import operator
import re
import tomllib
import unicodedata
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
TALK = QUESTIONS.pop("talk")   # the words
ONES, TENS, UNITS = (TALK[name].split() for name in ("ones", "tens", "units"))
UNIT_OF = {form: unit for unit in [*UNITS, *TALK["sizes"][0], *TALK["sizes"][1]]
           for form in (unit, unit + "s", unit + "es", unit[:-1] + "ies")}
VALUES = dict(zip([None, *ONES, *TENS], [0, *range(20), *range(20, 100, 10)]))
SPELLED = rf"\b(?:({'|'.join(TENS)})[ -]?)?({'|'.join(ONES)})\b|\b({'|'.join(TENS)})\b"
DOUBTS = {*TALK["doubts"].split()}
FILLERS, TURNS = (dict.fromkeys(TALK[name].split(), "") for name in ("fillers", "turns"))
CLASSES = {word: kind for kind, words in TALK["classes"].items() for word in words.split()}
NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: pow,
              ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
              ast.USub: operator.neg, ast.UAdd: operator.pos}
# A claim, in classes of words: Element, aLl, None, Rest, But, X not, V it is so, W it is not
CLAIM = re.compile(r"(?P<verb>[vw]|X?(?:V+|W+))?(?P<no>X?)(?P<base>[LNR]?)(?P<names>E*)B?"
                   r"(?P<out>E*)(?P<after>X?(?:V+|W+)|X(?![LNRE]))?")   # v, w: "pass: A, B"


class Unreadable(ValueError):
    """It costs no attempt. The message says what to write."""


def readings(guess, it):
    """[value, ...]: what a guess may mean. A string among them is never right, and says why."""
    reader = {bool: truth, str: names, list: series if it.get("ordered") else names}.get(
        type(it["answer"]), number)
    text, said = plain(guess), []
    for claim in text, *without_reason(text, reader):
        with suppress(Exception):   # whatever it is, it is no answer
            found = reader(claim, it)
            said = said or found if claim == text else said
            if not isinstance(found[0], str):
                return found
    if said:   # another unit
        return said
    form = TALK["forms"][reader.__name__].format(*it.get("of", ""))
    raise Unreadable(f"I cannot read {str(guess)[:60]!r} as an answer. Write {form}.")


def without_reason(text, reader):
    """What stands before a reason, the longest first: 13 (8 for A, 5 for B); H: no grey."""
    for at in reversed([*re.finditer(" *[:;(=] *| - |, ", text)] if reader is not truth else []):
        claim, reason = text[:at.start()], text[at.end():]
        part = reason[:1].isdigit() and re.search(r"\b(for|in|at|per|from)\b", claim)   # 8 for A, 5
        said = re.search("[a-z]{2}", reason) or (   # not one more number
            reader is number and at[0] != ", " and re.search(r"\d *[x*+/-] *\d", reason))
        if said and not part and not DOUBTS & {*re.findall("[a-z]+", reason)}:
            yield claim
    if reader is number and text.count(":") == 1:
        yield text.partition(":")[2]   # A 8, B 5: 13


def plain(guess):
    """A guess as text: small letters, plain signs, digits for numbers in words."""
    guess = guess.tolist() if hasattr(guess, "tolist") else guess
    if isinstance(guess, dict):   # {"A": True, "B": False}, or {step: number}
        guess = [key if of is True else of for key, of in guess.items() if of is not False]
    if isinstance(guess, Collection) and not isinstance(guess, (str, bytes)):
        return ", ".join(map(plain, guess)) or "none"
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", r"**\g<0>", str(guess)[:200])
    text = unicodedata.normalize("NFKC", text).lower()
    text = re.sub(SPELLED, lambda found: str(sum(map(VALUES.get, found.groups()))), text)
    for word, times in ("hundred", 100), ("thousand", 1000):   # two hundred and five, 50 thousand
        text = re.sub(rf"\b(\d[\d.]*) {word}\b(?: (?:and )?(\d+)\b)?", lambda found: "%.0f" % (
            float(found[1]) * times + float(found[2] or 0)), text)
    for old, new in TALK["plain"]:
        text = re.sub(old, new, text)
    return text.strip()


def number(text, it):
    """
    In the question's unit, in each reading: "4,900" and "4.900" have two. Where another unit is
    converted, a sentence says so.
    """
    *_, text = re.split(   # what is concluded: 11.8, so 11
        r"->|\bso\b|\b(?:rounded|total)\b(?!.* (?:up|down)$).*?(?=\d)", text)
    text = re.sub(r"(?<!/)\b(\d+)(?: ([a-z]+))? (?:out )?of (?:the |all |its )*(\d+)(?: [a-z]+)?",
                  lambda of: share(*of.groups(), it), text)
    rounding = re.search(r"\b(?:rounded |math\.)?(floor|ceil|down|up)\b *(?=[\d(]|$)", text)
    text, found = text.replace(rounding[0], "") if rounding else text, []
    for mark in ",_' ", ".":   # between thousands
        way = re.sub(rf"(?<=\d)(?<!\b0)[{mark}](?=\d{{3}}(?!\d))", "", text)
        parts = re.split("[=:;]", re.sub(r"(?<=\d),(?=\d)", ".", way))
        with suppress(KeyError, SyntaxError):   # it cannot be read in this way
            sides = [side for part in parts if (side := calculated(part, it)) is not None]
            sides = [side for side in sides if not isinstance(side, str)] or sides   # page 5: 22
            if all(each == sides[-1] or math.isclose(each, sides[-1], rel_tol=0.05) or
                   sides[-1] in (math.floor(each), math.ceil(each)) for each in sides):
                found += [sides[-1], sides[0]]
    if rounding:
        to_whole = math.floor if rounding[1] in ("floor", "down") else math.ceil
        found = [float(to_whole(each)) for each in found]
    unit = it.get("unit", "")
    if unit in TALK["sizes"][0] and re.search(rf"\d *(?!{unit})[kmgt]?i?b\b", text):
        written = unit.upper().replace("I", "i")   # KiB
        found += [f"That is {each:,.0f} {written}." if each >= 1000 else
                  f"That is {each:.3g} {written}." for each in found[:1] if isinstance(each, float)]
    if found and re.search("%(?! [*])|percent", text):
        found.append("No percentage is asked for.")
    return found or 1 / 0


def share(part, unit, whole, it):
    """4 of 8 requests are 4, 3 rows of 15 slots are 45."""
    if unit and UNIT_OF.get(unit) not in (None, *it.get("unit", "").split()):
        return f"{part} * {whole}"
    return f"{part} {unit or ''}" if int(part) < int(whole) else "?"


def in_bytes(text):
    """24.7 GB / 512 KiB, as a ratio of bytes."""
    def amount(found):   # a number with its unit, or the unit behind a bracket
        times = f"*{TALK['sizes'][0][found[2]]:.0f}"
        return f"({found[1]}{times})" if found[1] else times
    return re.sub(rf"(?:({NUMBER})|(?<=\))) *([kmgt]?i?b)\b", amount, text)


def calculated(text, it):
    """The value of an expression, a sentence if its unit is wrong, None if it has no number."""
    wanted = it.get("unit", "number").split()
    product = re.search(r"\*| [-+] |\b(x|times|by)\b", text)   # or a sum
    sizes = next((each for each in TALK["sizes"] if wanted[0] in each), {})
    if not sizes and "/" in text and len(re.findall(r"\b[kmgt]?i?b\b", text)) > 1:   # GB / KiB
        text = in_bytes(text)
    known = FILLERS | TALK["signs"] | dict.fromkeys(it.get("fillers", "").split(), "")
    code, units, loose, before = "", [], False, ""   # before: the number just before, if any
    for digits, word in re.findall(
            rf"({NUMBER})|([a-z]{{2,}}\(|[a-z]+(?:-reduces?)?|\*\*|//|\S)", text):
        if (unit := UNIT_OF.get(word)) and word not in TALK["signs"] and (sizes or word[1:]):
            code = code.removesuffix("/")   # GB/s
            units += [] if loose else [(unit, word)]
        elif digits or word in known or word[1:].isalpha() and word not in TURNS and not before:
            code += f" {float(digits)} " if digits else known.get(word, "")
        else:
            raise KeyError   # 13 bananas, n - 1, f(13)
        before = digits
        if code and word in ("of", "for", "in", "per")[:3 if sizes else 4]:
            loose = True   # slots of finished rows, scores per head: not asked for, but no fault
    if not re.search(r"\d", code):
        return None
    value = folded(ast.parse(code.strip(), mode="eval").body)
    if not 0 <= value < math.inf and not re.fullmatch(rf" *- *(?:{NUMBER}) *", text):   # a range
        raise KeyError
    if sizes and not units and value > 500 * it["answer"]:   # 68,719,476,736: nobody means GB
        units = [("b", "")]
    for i, (unit, word) in enumerate(units):
        if unit not in [*sizes, *wanted, *it.get("per", "").split() * (i > 0)] and not product:
            return f'Another unit is asked for, not "{word}".'
    return value * next((sizes[unit] / sizes[wanted[0]] for unit, _ in units if unit in sizes), 1)


def folded(node):
    """The value of arithmetic with numbers, and of nothing else."""
    if isinstance(node, ast.Constant):
        return float(node.value)
    parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(folded, parts))


def names(text, it):
    """{names}: what all claims say together. "A passes, B fails" are two claims."""
    order = [str(each).lower() for each in it["of"]]

    def span(found):   # from 3 on
        at = {group: order.index(name) for group, name in found.groupdict().items() if name}
        end = at.get("high", at.get("below", len(order)) - 1) + 1
        return " ".join(order[at.get("low", at.get("after", -1) + 1):end])
    text = re.sub(r"\bnot? 1\b", "none", text) if order[0].isalpha() else re.sub(
        "^-1$", "last", text)
    text = re.sub(r" = (?!but|except|not\b).*[a-z]{2}.*", "", text)   # a reason
    text = re.sub(r"(?<=\w),? (?:for|its|whose|which|it|they)\b.*", "", text)
    text = re.sub(r"\b(first|last)(?: (\d+))?\b(?! in (?:each|every|its|their))",
                  lambda found: " ".join(order[:int(found[2] or 1)] if found[1] == "first" else
                                         order[-int(found[2] or 1):]), text)
    for pattern in TALK["spans"]:
        text = re.sub(pattern.replace("NAME", rf"\b(?:{'|'.join(order)})\b"), span, text)
    text = re.sub(" = |, ?(?=(?:only|just)\\b)", " ; ", text).replace("=", " ")
    text = re.sub(TALK["nobody"], "none ", text)
    if re.match(r"(?:[a-z]+ )?\d (?:rows|pages|of)\b", text):
        raise ValueError   # how many, not which
    for words, asked in zip(("yes|true|do|does", "no|false"), TALK["asks"][it["asks"]]):
        text = re.sub(rf"\b(?:{words})\b(?= *(?:[,;.]|and\b|but\b|$))", asked.split()[0], text)
    kinds = dict.fromkeys(UNIT_OF, "") | FILLERS | CLASSES | dict.fromkeys(order, "E")
    other = "E" if order[0].isdigit() else ""   # what a number is that is no name
    for words, kind in zip(TALK["asks"][it["asks"]], "VW"):
        kinds |= dict.fromkeys(words.split(), kind)
    kinds |= {";": ";"}   # ends a claim
    classes, said = "", []
    for word, colon in re.findall(r"(\d+|[a-z]+|[^\w\s,.:&/+!?()'-])(?: *(:))?", text):
        for each in [word] if word in kinds or not {*word} <= {*order} else word:   # AC
            kind = kinds.get(each, other) if each.isdigit() else kinds[each]
            classes += kind.lower() if colon and kind in "VW" else kind
            said += [each] * len(kind)
    return [claimed({*order}, classes, said)]


def claimed(every, classes, said):
    """The names that are so. Where claims say only which are not, those are the others."""
    is_so, is_not, some, last = set(), set(), False, False
    for claim in sorted(CLAIM.finditer(classes), key=lambda claim: claim["base"] == "R"):
        inner, out = ({*said[slice(*claim.span(group))]} for group in ("names", "out"))
        verbs = "".join(filter(None, claim.group("verb", "no", "after"))).lower()
        no = (verbs.count("x") + ("w" in verbs)) % 2
        if claim["base"]:
            inner = {"L": every - out, "N": out, "R": every - is_so - is_not}[claim["base"]]
        elif not inner and claim["after"]:   # A passes, but B fails
            inner = out
        some |= bool(inner or claim["base"]) and not no
        (is_not if no else is_so).update(inner)
        if not claim["base"] and inner != out:   # all pass, but B; all fail, but B
            (is_so if last or no else is_not).update(out)
            (is_not if last or no else is_so).difference_update(out)
            some |= bool((last or no) and out)
        last = no
        if no and not (inner or claim["base"] or out):
            raise ValueError
    if is_so & is_not and "L" not in classes or not (some or is_not or "N" in classes):
        raise ValueError
    return is_so - is_not if some else every - is_not


def series(text, it):
    """[[number, ...]] in order."""
    text = text.partition(" = ")[0]   # behind it is a sum, or a reason
    text = re.sub(r"\b(?:(?:in|at) )?step \d\b *:?|(?:^|(?<=[,;]))\s*\d+ *(?:->|:) *"
                  r"(?=\d+[^\d>]*(?:[,;]|$))", " ", text)   # step 0: 3, step 1: 6
    text = re.sub(r"\b[a-z](?=\d)", "", text)   # C3
    found, unit = re.findall(NUMBER, text), it["unit"].split()
    turns = {*TURNS, "to", "per", "x", "total"} & {*re.findall("[a-z]+", text)}
    if (turns or not 0 < len(found) <= len(it["answer"])
            or any(UNIT_OF.get(word, "each") not in [*unit, "each"]
                   for word in re.findall(r"\d *([a-z-]+)", text))
            or re.search(r"[^\w\s,;:/<>|.&()=+-]|(?:^|[,;] *)-\d|\d-\d[^-]*,", text)):
        raise ValueError
    return [[*map(float, text if len(found) == 1 and len(text) > 2 and text.isdigit() else found)]]


def truth(text, it):
    """Yes or no; all words that say so must agree."""
    kinds = {"not": "X"} | {
        word: kind for name, words, kind in zip(("yes", "no"), it["asks"], "VW")
        for word in (TALK[name] + " " + words).split()}
    words = re.findall("[a-z]+", text)
    if (DOUBTS - {"but"} | {*TALK["changes"].split()}) & {*words}:
        raise ValueError
    classes = "".join(kinds.get(word, "") for word in words)
    [value] = {("X" in each) == ("W" in each) for each in re.findall("X?[VW]|X", classes)}
    return [value]
