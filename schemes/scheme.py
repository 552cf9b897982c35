"""Scheme strings: from what a user writes to a class and its options, and back.

    learned  sin  rope  alibi  none       the four encodings, and the control without any
    rope:base=10,interleaved=false        … with options of its class
    t5                                    schemes/t5.py, the one scheme class in it
    path/to/my_pos.py:MyClass:key=1       a class of your own

The class is one of three kinds, told apart by the methods it has:

    embedding   (dim, **options)           forward(positions) -> (…, T, C), added once to the
                                           token embeddings
    relation    (n_head, head_dim, **options), with one or both of
                                           rotate(q, k, q_positions, k_positions) -> q, k
                                           bias(q, k, q_positions, k_positions) -> (H, T, S) or
                                           (B, H, T, S), added to q·k/√D
    attention   (dim, n_head, **options)   forward(x, positions=None, cache=None) -> (B, T, C)

A class is handed `layer`, `n_layer`, `trained_len`, `max_len` and `attend` if it declares them.
"""

import importlib.util
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from pos_alibi import ALiBiAttention
from pos_learned import LearnedPositionalEmbedding
from pos_sin import SinusoidalPositionalEncoding
from schemes.rope_scaling import ScaledRoPEAttention

FOLDER = Path(__file__).parent
# In the order of every table and picture; `none` adds nothing to the network's own attention.
CLASSIC = {
    "learned": LearnedPositionalEmbedding,
    "sin": SinusoidalPositionalEncoding,
    "rope": ScaledRoPEAttention,
    "alibi": ALiBiAttention,
    "none": None,
}
SCHEMES = tuple(CLASSIC)
HANDED = ("layer", "n_layer", "trained_len", "max_len", "attend")  # to a class that declares them


@dataclass(frozen=True)
class Scheme:
    """A scheme string, the class it names (None for `none`) and the options in it."""

    text: str
    cls: type | None
    options: dict

    @property
    def kind(self):
        return kind_of(self.cls)

    @property
    def takes(self):
        """The names of the class's constructor parameters."""
        return set() if self.cls is None else set(inspect.signature(self.cls).parameters)

    def build(self, *size, **offered):
        """The module: size is (dim,), (n_head, head_dim) or (dim, n_head), by kind."""
        offered = {key: value for key, value in offered.items() if key in self.takes}
        return self.cls(*size, **offered | self.options)

    @property
    def longer_ways(self):
        """The names of the ways to read it past its trained length, without those it fixes."""
        ways = getattr(self.cls, "LONGER", ())
        if ways and not hasattr(self.cls, "longer"):
            raise ValueError(
                f"scheme '{self.text}': its class has LONGER but no method `longer(way, n, L)`"
            )
        return tuple(way for way in ways if not set(self.cls.longer(way, 2, 1)) & set(self.options))

    def longer(self, way, n, L):
        """The scheme string of a model trained at L when it is read at n in this way."""
        return with_options(self.text, **self.cls.longer(way, n, L))


def kind_of(cls):
    """embedding, relation or attention, by the methods of the class; `none` is a relation.

    A forward of one tensor is an embedding's, as is one whose first is called positions; any other
    is an attention layer's, whatever other methods there are.
    """
    if cls is None:
        return "relation"
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    several = len(parameters) > 1 or any(p.kind == p.VAR_POSITIONAL for p in parameters)
    of_positions = bool(parameters) and parameters[0].name == "positions"
    relates = any(callable(getattr(cls, name, None)) for name in ("rotate", "bias"))
    if cls.forward is nn.Module.forward and relates:
        return "relation"
    if several and not of_positions:
        return "attention"
    return "relation" if relates else "embedding"


def with_options(text, **options):
    """rope:base=10 and scaling="yarn" -> rope:base=10,scaling=yarn."""
    if not options:
        return text
    colon = "," if ":" in text.split(".py:")[-1] else ":"
    return text + colon + ",".join(f"{key}={_written(value)}" for key, value in options.items())


def _written(value):
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def tidy(text):
    """./my_pos.py:Mine -> my_pos.py:Mine, so that one file has one name."""
    path, dot, rest = text.partition(".py:")
    return Path(path).as_posix() + dot + rest if dot else text


def parse_scheme(text):
    """A scheme string -> Scheme. ValueError names what is unknown and what there is."""
    if ".py:" in text:
        path, rest = text.split(".py:", 1)
        name, colon, options = rest.partition(":")
        cls = _class_from_file(Path(path + ".py"), name)
    else:
        name, colon, options = text.partition(":")
        cls = _class_by_name(text, name)
    chosen, known = {}, {} if cls is None else options_of(cls, own=".py:" in text)
    for option in options.split(",") if colon else ():
        key, equals, value = option.partition("=")
        if key in chosen:
            raise ValueError(f"scheme '{text}': {key} is given twice")
        if key not in known or not equals:
            there_is = ", ".join(map(_shown, known.values())) or "no options"
            raise ValueError(f"scheme '{text}': no option '{option}'; {name} takes {there_is}")
        chosen[key] = _option_value(text, key, value, known[key].default)
    return Scheme(text, cls, chosen)


def _shown(parameter):
    """An option as a user would write it, with its default."""
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default}"


def options_of(cls, own=False):
    """The constructor parameters of a class that a scheme string may set."""
    hidden = {"dim", "n_head", "head_dim", "attend", "layer", "n_layer"}
    if not own:  # the language model is causal; attention that sees its target learns nothing
        hidden |= {"causal", "frequencies", "amplitude"}
    return {k: p for k, p in inspect.signature(cls).parameters.items() if k not in hidden}


def encoding_names():
    """The schemes of schemes/: its files, but for the two that are no scheme."""
    files = (path.stem for path in FOLDER.glob("*.py"))
    return sorted(name for name in files if name not in ("__init__", "scheme", "rope_scaling"))


def _class_by_name(text, name):
    if name in CLASSIC:
        return CLASSIC[name]
    names = encoding_names()
    if name not in names:
        there_are = ", ".join([*SCHEMES, *names])
        raise ValueError(f"unknown scheme '{text}': use {there_are}, or path/to/file.py:ClassName")
    module = importlib.import_module(f"schemes.{name}")
    classes = [value for value in vars(module).values() if _is_module_class(value)]
    classes = [cls for cls in classes if cls.__module__ == module.__name__]
    if len(classes) != 1:
        raise ValueError(f"scheme '{text}': schemes/{name}.py must define one nn.Module class")
    return classes[0]


def _option_value(scheme, key, text, default):
    """The text as the type that the option's default has."""
    free = default in (inspect.Parameter.empty, None)
    kind = float if free else type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        if free:
            return text
        article = "an" if kind.__name__[0] in "aeiou" else "a"
        kind = f"{article} {kind.__name__}"
        raise ValueError(f"scheme '{scheme}': {key} must be {kind}, not '{text}'") from None


def _class_from_file(path, name):
    if not path.is_file():
        raise ValueError(f"scheme file {path}: no such file")
    try:
        module = _module_of(path)
    except (Exception, SystemExit) as error:  # whatever somebody's file raises, the file is wrong
        raise ValueError(f"scheme file {path} cannot be imported: {reason(error)}") from None
    cls = getattr(module, name, None)
    if not _is_module_class(cls):
        classes = {key: value for key, value in vars(module).items() if _is_module_class(value)}
        own = (key for key, value in classes.items() if value.__module__ == module.__name__)
        has = ", ".join(own) or "none"
        raise ValueError(f"scheme file {path}: no nn.Module class '{name}'; it has {has}")
    return cls


def _module_of(path):
    """The module of a file, run anew, with what it imports from beside it."""
    spec = importlib.util.spec_from_file_location(f"scheme file {path}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    folder, before = str(path.resolve().parent), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:  # two folders may have files of one name
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == Path(folder):
                del sys.modules[name]
    return module


def _is_module_class(value):
    return isinstance(value, type) and issubclass(value, nn.Module)


def reason(error):
    """An exception in one line."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
