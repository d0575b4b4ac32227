"""libmoe.py - libmoe's C interface through ctypes, made from the headers themselves: their structs, enumerators and
prototypes are the one table.  The library is asked for the sizes of its structs (Library.check_size), so that headers
of another version are found out."""
import ctypes
import pathlib
import re

BASE = {
    "void": None, "char": ctypes.c_char, "int": ctypes.c_int, "double": ctypes.c_double, "uint8_t": ctypes.c_uint8,
    "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "moe_status": ctypes.c_int,
}
ERR_VERSION = -12


class MoeError(Exception):
    def __init__(self, status, text):
        super().__init__(f"{text} ({status})")
        self.status = status


def header_text(include):
    """moe.h and moe/cuda.h with what they include, each header once and behind those it needs; no comments."""
    seen = set()

    def expand(name):
        if name in seen:
            return ""
        seen.add(name)
        text = re.sub(r"/\*.*?\*/", " ", (include / "moe" / name).read_text(), flags=re.S)
        return re.sub(r"#include <moe/(\w+\.h)>", lambda found: expand(found[1]), text)

    return expand("moe.h") + expand("cuda.h")


class Library:
    """lib = Library(path, include); lib.moe_queue_wait(q) raises MoeError; lib.new("moe_experts_io", x=...)."""

    def __init__(self, path, include):
        self._so = ctypes.CDLL(str(path))
        self._so.moe_last_error.restype = ctypes.c_char_p
        text = header_text(pathlib.Path(include))
        self._constants, self._structs = {}, {}
        for name, value in re.findall(r"#define (MOE_\w+) (\d+)\b", text):
            self._constants[name] = int(value)
        for body in re.findall(r"typedef enum \w+ \{([^{}]*)\} \w+;", text):
            for name, value in re.findall(r"(MOE_\w+)\s*=\s*(-?\d+)", body):
                self._constants[name] = int(value)
        for body, name in re.findall(r"typedef struct \w+ \{([^{}]*)\} (\w+);", text):
            self._add_struct(name, body)
        prototype = r"MOE_API\s+(?:MOE_CHECKED\s+)?([\w *]+?)(moe_\w+)\(([^()]*)\);"
        for result, name, parameters in re.findall(prototype, text):
            self._add_function(result.strip(), name, parameters)

    def _type(self, words, pointer):
        """The ctypes type of `const moe_tensor *` and the like."""
        word = [w for w in words.split() if w not in ("const", "struct")][0]
        if pointer:
            return ctypes.c_char_p if word == "char" and "const" in words.split() else ctypes.c_void_p
        return self._structs.get(word) or BASE[word]

    def _add_struct(self, name, body):
        fields = []
        for member in filter(None, (m.strip() for m in body.split(";"))):
            callback = re.search(r"\(\*(\w+)\)", member)
            if callback:
                fields.append((callback[1], ctypes.c_void_p))
                continue
            words, rest = re.match(r"((?:const |struct )?\w+)\s*(.*)$", member, flags=re.S).groups()
            for declared in rest.split(","):
                pointer, field, count = re.match(r"\s*(\**)(\w+)(?:\[(\w+)\])?$", declared).groups()
                kind = self._type(words, pointer)
                if count:
                    kind = kind * int(self._constants.get(count, count))
                fields.append((field, kind))
        self._structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})

    def _add_function(self, result, name, parameters):
        if not hasattr(self._so, name):
            return
        function = getattr(self._so, name)
        types = []
        for parameter in parameters.split(","):
            if parameter.strip() in ("", "void"):
                continue
            array = "[" in parameter
            words, stars = re.match(r"\s*((?:const |struct )*\w+)\s*(\**)", parameter).groups()
            types.append(self._type(words, stars or array))
        function.argtypes = types
        function.restype = self._type(result.rstrip("*"), "*" in result)
        if result == "moe_status":
            def checked(*arguments):
                status = function(*arguments)
                if status:
                    raise MoeError(status, self._so.moe_last_error().decode())
            setattr(self, name, checked)
        else:
            setattr(self, name, function)

    def __getattr__(self, name):
        """Enumerators and structs: lib.MOE_BF16, lib.moe_tensor."""
        for table in (self._constants, self._structs):
            if name in table:
                return table[name]
        raise AttributeError(name)

    def new(self, name, **members):
        struct = self._structs[name]()
        if name not in ("moe_span", "moe_tensor"):
            struct.size = ctypes.sizeof(struct)
        for member, value in members.items():
            setattr(struct, member, value)
        return struct

    def check_size(self, struct, call):
        """call(pointer) hands the struct to a function that reads it; one with a set member past its end must be
        refused, with words that say how many bytes the library knows."""
        size = ctypes.sizeof(struct)
        longer = ctypes.create_string_buffer(bytes(struct) + b"\1" * 8, size + 8)
        ctypes.memmove(longer, ctypes.byref(ctypes.c_uint64(size + 8)), 8)
        try:
            call(longer)
        except MoeError as error:
            known = re.search(r"knows (\d+)", str(error))
            if error.status != ERR_VERSION or not known:
                raise
            if int(known[1]) != size:
                raise AssertionError(f"{type(struct).__name__}: {size} bytes here, {known[1]} in the library") from None
            return
        raise AssertionError(f"{type(struct).__name__}: a longer struct was not refused")
