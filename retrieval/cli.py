"""The command ``condenser``: one verb per stage, its options taken from the stage's dataclass.

Nothing heavy is imported before a verb's options are parsed, so that ``--help`` and every typo
answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import signal
import sys
import threading
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from condenser.errors import UserError, nearest
from condenser.files import NO_SPACE
from condenser.options import option_name
from retrieval.verbs import VERBS, load

_DISK_FAULTS = (*NO_SPACE, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_PATH_FAULTS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status.

    0 done, 1 internal error (with a traceback) or a disk that is full or refuses (one line), 2 bad input or
    options (one line), 130 Ctrl-C, 141 nobody reads the output any more, 143 stopped by SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # the same bytes under any locale
    try:
        with _ended_by_sigterm():
            return _run(words)
    except UserError as error:
        print(f"condenser: error: {error}", file=sys.stderr)
        return error.exit_status
    except _TerminatedError:
        print("condenser: terminated; run the same command again to go on", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("condenser: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Else Python would try to write the rest once more as it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno in _PATH_FAULTS and error.filename is not None:
            print(f"condenser: error: {UserError(str(error.strerror), error.filename)}", file=sys.stderr)
            return 2
        if error.errno not in _DISK_FAULTS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"condenser: error: {place}{error.strerror}{_free_space(error)}", file=sys.stderr)
        return 1


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which is to be cleared up after as Ctrl-C is; training saves first, and ends by itself."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # others cannot
        yield
        return

    def end(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_space(error: OSError) -> str:
    """Say how much is free where a write failed for want of space, if that can be told."""
    place = error.filename
    if error.errno not in NO_SPACE or not isinstance(place, str | os.PathLike):
        return ""
    folder = next((parent for parent in Path(place).absolute().parents if parent.is_dir()), None)
    return f" ({shutil.disk_usage(folder).free / 2**30:,.1f} GiB free there)" if folder else ""


def _run(words: list[str]) -> int:
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(f"argument {word!r} is not UTF-8", hint="rename the file")
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        import importlib.metadata

        print(f"condenser-ir {importlib.metadata.version('condenser-ir')}")
        return 0
    verb, rest = _find_verb(words)
    options = parse_options(verb, rest)
    if options is None:
        return 0
    try:
        result = load(VERBS[verb].function)(options)
    except UserError as error:
        if error.report is not None:
            print(error.report, flush=True)
        raise
    # several processes started by torchrun have one result
    if result is not None and os.environ.get("RANK", "0") == "0":
        print(result, flush=True)
    return 0


def _overview() -> str:
    width = max(len(name) for name in VERBS)
    lines = [f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: condenser VERB [--option value ...]",
            "",
            "From raw text to a measured retriever:",
            *lines,
            "",
            "condenser VERB --help shows a verb's options; --config FILE.yaml takes them from a file.",
        ]
    )


def _find_verb(words: list[str]) -> tuple[str, list[str]]:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in VERBS:
            return name, words[length:]
    below = [name for name in VERBS if name.startswith(f"{words[0]} ")]
    if below:
        close = nearest(" ".join(words[:2]), below) if len(words) > 1 and not words[1].startswith("-") else None
        raise UserError(f"{words[0]} wants one of {', '.join(below)}", hint=f"did you mean {close}?" if close else None)
    close = nearest(words[0], dict.fromkeys(name.split()[0] for name in VERBS))
    if close is not None and close not in VERBS:  # the first of two words
        close = nearest(" ".join([close, *words[1:2]]), [name for name in VERBS if name.startswith(f"{close} ")])
    hint = f"did you mean {close}?" if close else "condenser --help lists the verbs"
    raise UserError(f"unknown verb {words[0]!r}", hint=hint)


def parse_options(verb: str, words: Sequence[str]) -> Any:
    """Turn a verb's command line into its options dataclass; None when help or the config was printed.

    Raises:
        UserError: an unknown option (with the nearest known one), a missing or ill-typed value.
    """
    options_class = load(VERBS[verb].options)
    parser = _build_parser(verb, options_class)
    try:
        known = parser.parse_args([_with_underscores(word) for word in words])
    except SystemExit as stop:
        if stop.code:
            raise
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"--config holds no YAML text: {error.reason}") from None
    except RecursionError:
        raise UserError("--config holds YAML that contains itself") from None
    values = {field.name: getattr(known, option_name(field.name)) for field in dataclasses.fields(options_class)}
    _check_given(options_class, values)
    return options_class(**values)


def _check_given(options_class: type, values: dict[str, Any]) -> None:
    """Refuse what is missing, and the ``null`` that a config can give to any option."""
    hints = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        if _is_required(field) and values[field.name] in (None, []):
            raise UserError(f"--{field.name} is missing: {field.metadata['help']}")
        if isinstance(values[field.name], str) and "\0" in values[field.name]:
            raise UserError(f"--{option_name(field.name)} holds a NUL character", hint="write it as text without one")
        hint = hints[field.name]
        if values[field.name] is None and type(None) not in typing.get_args(hint):
            raise UserError(f"--{option_name(field.name)} is null, expected {_in_words(hint)}")


def _with_underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _build_parser(verb: str, options_class: type) -> Any:
    import jsonargparse

    hints = {option_name(name): hint for name, hint in typing.get_type_hints(options_class).items()}
    positional = VERBS[verb].positional

    class OneLineParser(jsonargparse.ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise _explain(str(message), hints, positional)

    parser = OneLineParser(
        prog=f"condenser {verb}",
        description=(options_class.__doc__ or "").strip(),
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="YAML file of options")
    for field in dataclasses.fields(options_class):
        _add_argument(parser, field, hints[option_name(field.name)], field.name in positional)
    return parser


def _add_argument(parser: Any, field: dataclasses.Field[Any], hint: Any, positional: bool) -> None:
    import jsonargparse

    name = option_name(field.name) if positional else f"--{option_name(field.name)}"
    settings: dict[str, Any] = {"help": _help_line(field)}
    if not _is_required(field):
        settings["default"] = field.default_factory() if callable(field.default_factory) else field.default
    if typing.get_origin(hint) is list:
        settings |= {"type": typing.get_args(hint)[0], "nargs": "+"}
    elif hint is bool or hint == bool | None:
        settings |= {"action": jsonargparse.ActionYesNo, "nargs": "?"}
    elif hint in (str, str | None):
        # As a plain string: an optional one would be read as YAML, in which "# x" is nothing and "null" is null.
        settings["type"] = str
    elif _is_required(field):
        settings["type"] = typing.Optional[hint]  # noqa: UP045 - built at run time
    else:
        settings["type"] = hint
    parser.add_argument(name, **settings)


def _help_line(field: dataclasses.Field[Any]) -> str:
    allowed = f" ({field.metadata['range']})" if any(bound is not None for bound in field.metadata["range"]) else ""
    return field.metadata["help"] + allowed + (" (required)" if _is_required(field) else "")


def _explain(message: str, hints: dict[str, Any], positional: tuple[str, ...] = ()) -> UserError:
    """Reduce jsonargparse's message to one line, and name the nearest option to an unknown one."""
    import re

    unknown = re.search(r"(?:[Uu]nrecognized arguments: |Option ')([^\s']+)", message)
    if unknown:
        word = unknown.group(1)
        if not word.startswith("-") and "Option" not in message:
            return UserError(f"unexpected argument {word!r}", hint="options start with --")
        name = word.split("=")[0]
        close = nearest(name.lstrip("-"), hints)
        shown = name if name.startswith("-") else f"--{name}"
        if close in positional:
            return UserError(f"unknown option {shown}", hint=f"write the {close} without an option's name before it")
        return UserError(f"unknown option {shown}", hint=f"did you mean --{close}?" if close else "see --help")
    ill_typed = re.search(r'Parser key "(\w+)".*(?:Given value|Got value): (.*)', message, re.DOTALL) or re.search(
        r"argument --(\w+).*invalid .* value: '(.*)'", message
    )
    if ill_typed and ill_typed.group(1) in hints:
        name, value = ill_typed.groups()
        return UserError(f"--{name} is {value.strip()!r}, expected {_in_words(hints[name])}")
    missing = re.search(r"File does not exist: '(.*)'", message)
    if missing:
        return UserError("no such file", missing.group(1))
    if re.search("object does not support item assignment|object is not iterable", message):
        return UserError("--config gives one value to an option that takes a list", hint="write [one, two]")
    if re.match("Unexpected config|Problems parsing config", message):
        return UserError(f"--config holds no YAML mapping of options: {' '.join(message.split())}")
    return UserError(" ".join(message.removeprefix("argument ").replace("Parser key", "option").split()))


def _in_words(hint: Any) -> str:
    """Say what values a type takes."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_in_words(part) for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return _in_words(typing.get_args(hint)[0])
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "text")


if __name__ == "__main__":
    sys.exit(main())
