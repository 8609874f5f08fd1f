"""Options of the verb that shows a constraint."""

from __future__ import annotations

from dataclasses import dataclass

from condenser.options import Options, option, required, source


@dataclass(frozen=True, kw_only=True)
class LmAutomatonOptions(Options):
    """A constraint as an automaton over a tokenizer's tokens: its table, with texts that it accepts.

    words:gout,uric acid (all of them), any:gout,uric acid, regex:what is .* (the whole text); and, or, not, brackets.
    """

    expression: str = required("the constraint, such as 'words:gout and not any:pain,fever'")
    tokenizer: str = source("folder or hub name of the tokenizer")
    samples: int = option(5, "shortest accepted texts shown", minimum=0, maximum=1000)
    dot: bool = option(False, "print a picture instead, as DOT text for Graphviz")
