"""Reads shared libraries of any system: what they export, and what they need."""

import pathlib
import re
from typing import NamedTuple

import eqquant
from eqquant.kernels.native import _library


# What they export beside what XLA calls.
_source = pathlib.Path(eqquant.__file__).parent / "kernels/native/src"
_exports = {
    *_library.functions(),
    *(
        name
        for path in _source.rglob("*.cpp")
        for name in re.findall(r"^EQQUANT_EXPORT .*?(\w+)\(", path.read_text(), re.M)
    ),
}
# The versions of macOS and of Windows. (auditwheel looks at those of Linux.)
_oldest = {"macos-arm64": (11, 0), "windows-x86_64": (10, 0)}
_standard = r"_Z((NK?|T[ISV]N?)?St|n[wa]|d[la])|__dso_handle$|_mh_dylib_header$"
# The libraries of each system that they may need, all of which it comes with.
_needs = {
    "linux-x86_64": r"libc|libm|libpthread|libstdc\+\+|libgcc_s|ld-linux-x86-64",
    "linux-aarch64": r"libc|libm|libpthread|libstdc\+\+|libgcc_s|ld-linux-aarch64",
    "macos-arm64": r"/usr/lib/libSystem\.B\.dylib|/usr/lib/libc\+\+\.1\.dylib",
    "windows-x86_64": r"kernel32\.dll|ntdll\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll",
}


class Library(NamedTuple):
    system: str
    exports: set[str]
    needs: set[str]  # the names of libraries
    oldest: tuple[int, int]  # the version of the system, or zeros
    signed: bool


def read(file: bytes) -> Library:
    """What a shared library is, as `lief` reads it."""
    import lief

    library = lief.parse(list(file))
    if isinstance(library, lief.ELF.Binary):
        system = f"linux-{library.header.machine_type.name.lower()}"
        exports = {str(symbol.name) for symbol in library.exported_symbols}
        needs = {re.sub(r"\.so.*", "", str(each)) for each in library.libraries}
        return Library(system, exports, needs, (0, 0), False)
    if isinstance(library, lief.MachO.Binary):
        system = f"macos-{library.header.cpu_type.name.lower()}"
        names = (str(symbol.name) for symbol in library.exported_symbols)
        exports = {name.removeprefix("_") for name in names}
        own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
        needs = {str(each.name) for each in library.libraries if each.command != own}
        major, minor, _ = library.build_version.minos
        return Library(
            system, exports, needs, (major, minor), library.has_code_signature
        )
    assert isinstance(library, lief.PE.Binary), type(library)
    machine = library.header.machine.name.lower().replace("amd64", "x86_64")
    system = f"windows-{machine}"
    exports = {str(entry.name) for entry in library.get_export().entries}
    needs = {str(each.name).lower() for each in library.imports}
    header = library.optional_header
    oldest = (header.major_subsystem_version, header.minor_subsystem_version)
    return Library(system, exports, needs, oldest, False)


def check(file: bytes, name: str) -> None:
    """That a library is for a target, exports the functions that Python and XLA call
    and no others, needs nothing but libraries of the system, and runs on the oldest
    systems that Python 3.11 and JAX do."""
    found = read(file)
    # (The C++ library makes its templates visible, and its operators `new` and
    # `delete`. Linkers add two marks for macOS.)
    mine = {each for each in found.exports if not re.match(_standard, each)}
    assert found.system == name, found.system
    assert mine == _exports, sorted(mine ^ _exports)
    assert all(re.fullmatch(_needs[name], each) for each in found.needs), found.needs
    assert found.oldest <= _oldest.get(name, (0, 0)), found.oldest
    # Processors of Apple run nothing that is not signed, be it by nobody.
    assert found.signed == (name == "macos-arm64")
