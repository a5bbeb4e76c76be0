"""How long phase 4's longest prompt is: beyond every length at which the function changes, where that costs little; and what is said of the others."""

from dataclasses import dataclass

from labkit.errors import LabError
from labkit.hf import open_source
from labkit.hf.changing_lengths import ChangingLength, changing_lengths, position_limit
from labkit.lab.records import Records

LONGEST = 640
BEYOND = 16  # tokens past a length: a fault there has this many positions to show at


@dataclass(frozen=True)
class Reach:
    """longest: tokens of the longest prompt. reached: the changing lengths below it. left: sentences, one per length that no prompt of phase 4 goes beyond."""

    longest: int
    reached: list[ChangingLength]
    left: list[str]

    @property
    def told(self) -> list[str]:
        """A sentence for every changing length."""
        beyond = "{key} is {length}, and the longest prompt, of {longest} tokens, goes beyond it"
        return [*(beyond.format(key=each.key, length=each.length, longest=self.longest) for each in self.reached), *self.left]


def reach(source, minimum: int, steps: int, records: Records) -> Reach:
    """The longest prompt of `minimum` tokens or more. steps: tokens decoded after it, which learned positions must have room for."""
    lengths, room = changing_lengths(source), position_limit(source)
    most = LONGEST if room is None else min(LONGEST, room - steps)
    longest = max([minimum, *(each.length + BEYOND for each in lengths if each.length + BEYOND <= most)])
    tiny = _tiny(source.config.model_type, records) if any(each.length >= longest for each in lengths) else {}
    reached = [each for each in lengths if each.length < longest]
    fits = lambda each: room is None or each.length + BEYOND + steps <= room
    return Reach(longest, reached, [_left(each, longest, tiny, fits(each)) for each in lengths if each.length >= longest])


def _left(each: ChangingLength, longest: int, tiny: dict, fits: bool) -> str:
    words = f"{each.key} is {each.length} and the longest prompt has {longest} tokens: beyond it, where {each.what} begins to matter, the port is "
    if (each.key, each.what) in tiny:
        length, tokens = tiny[each.key, each.what]
        return words + f"proven on the tiny configuration of phase 2 only ({each.key} {length}, {tokens} tokens)"
    return words + "not proven by any phase" + (f"; `labkit run -p longest {each.length + BEYOND}` reaches it" if fits else "")


def _tiny(model_type: str, records: Records) -> dict[tuple[str, str], tuple[int, int]]:
    """(key, what) -> (length, tokens) of the lengths that phase 2 went beyond on its tiny configuration."""
    previous = records.read(2)
    tokens = int(previous.parameters.get("length", 0)) if previous else 0
    try:
        lengths = changing_lengths(open_source(f"tiny:{model_type}"))
    except LabError:
        return {}
    return {(each.key, each.what): (each.length, tokens) for each in lengths if each.length < tokens}
