"""Write the bill of materials of a release: CycloneDX 1.5, from what is installed.

    python tools/sbom.py dist/symmerge.cdx.json

Lists symmerge and everything it needs without extras, with versions, licences and a digest of what
pip installed. The same installation gives the same bytes: there is no date in it.
"""

from __future__ import annotations

import json
import re
import sys
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import Requirement

ROOT = "symmerge"
SCHEMA = "http://cyclonedx.org/schema/bom-1.5.schema.json"
LICENCE = "License :: OSI Approved :: "
LONGEST_NAME = 80  # some packages put the whole text of their licence into the field for its name


def bill_of_materials(root: str = ROOT) -> dict[str, object]:
    """The content of the file."""
    needed = closure(root)
    refs = {name: purl(one) for name, one in needed.items()}
    components = [component(one) for name, one in needed.items() if name != root]
    content: dict[str, object] = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(needed[root], "application")},
        "components": components,
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[need] for need in needs_of(one) & {*refs})}
            for name, one in needed.items()
        ],
    }
    serial = uuid5(NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {**content, "serialNumber": f"urn:uuid:{serial}"}


def closure(root: str) -> dict[str, Distribution]:
    """The distribution and all that it needs, by normalised name, in order of names."""
    found: dict[str, Distribution] = {}
    waiting = [normalized(root)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is needed and not installed: run make test once, then again")
        waiting += needs_of(found[name])
    return dict(sorted(found.items()))


def needs_of(one: Distribution) -> set[str]:
    """Names of what a distribution needs here, without extras."""
    requirements = [Requirement(line) for line in one.requires or ()]
    return {
        normalized(need.name)
        for need in requirements
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def purl(one: Distribution) -> str:
    """The package URL: pkg:pypi/torch@2.6.0."""
    return f"pkg:pypi/{normalized(one.metadata['Name'])}@{quote(one.version, safe='')}"


def component(one: Distribution, kind: str = "library") -> dict[str, object]:
    """One entry: name, version, licence, and a digest of the list of installed files."""
    record = one.read_text("RECORD")
    digest = {
        "name": "symmerge:sha256-of-RECORD",
        "value": sha256((record or "").encode()).hexdigest(),
    }
    return {
        "type": kind,
        "bom-ref": purl(one),
        "name": one.metadata["Name"],
        "version": one.version,
        "purl": purl(one),
        "licenses": licences(one),
        **({"properties": [digest]} if record and kind == "library" else {}),
    }


def licences(one: Distribution) -> list[dict[str, object]]:
    """Expression, classifiers or field, whichever there is first."""
    said = one.metadata
    if expression := said.get("License-Expression"):
        return [{"expression": expression}]
    classified = [line.removeprefix(LICENCE) for line in said.get_all("Classifier") or ()]
    known = [line for line in classified if " :: " not in line]
    if not known and (name := said.get("License")) and len(name) <= LONGEST_NAME:
        known = [name]
    return [{"license": {"name": name}} for name in known]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/sbom.py FILE.cdx.json")
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    content = bill_of_materials()
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
    print(f"wrote {file}: {len(closure(ROOT))} distributions")


if __name__ == "__main__":
    main()
