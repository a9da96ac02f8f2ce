"""What goes with a release: the bill of materials, and the check for known vulnerabilities."""

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name):
    spec = spec_from_file_location(name, TOOLS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bill(tmp_path_factory):
    """The bill as the program writes it."""
    file = tmp_path_factory.mktemp("bill") / "dist" / "symmerge.cdx.json"
    line = [sys.executable, TOOLS / "sbom.py", file]
    subprocess.run(line, check=True, capture_output=True)
    first = file.read_bytes()
    subprocess.run(line, check=True, capture_output=True)
    assert file.read_bytes() == first  # no dates
    return json.loads(first)


def test_the_bill_lists_what_is_installed(bill):
    components = {one["name"].lower(): one for one in bill["components"]}
    for name in ("torch", "transformers", "safetensors", "numpy", "huggingface-hub"):
        one = components.get(name) or components[name.replace("-", "_")]
        assert one["version"] == version(name) and one["licenses"], name
    assert components["torch"]["purl"] == f"pkg:pypi/torch@{version('torch').replace('+', '%2B')}"
    assert "pytest" not in components and bill["metadata"]["component"]["name"] == "symmerge"


def test_the_bill_has_the_fields_that_cyclonedx_requires(bill):
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert bill["serialNumber"].startswith("urn:uuid:") and len(bill["serialNumber"]) == 45
    for one in (*bill["components"], bill["metadata"]["component"]):
        assert {"type", "name", "version", "purl", "bom-ref"} <= one.keys()
        for licence in one["licenses"]:
            assert set(licence) == {"expression"} or licence["license"]["name"]
    refs = [one["bom-ref"] for one in bill["components"]]
    refs.append(bill["metadata"]["component"]["bom-ref"])
    assert len(refs) == len(set(refs)) == len(bill["dependencies"])
    assert {need for one in bill["dependencies"] for need in one["dependsOn"]} < set(refs)


FLAW = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
ASKED = {"name": "torch", "version": "1.0", "vulns": []}
SKIPPED = {"name": "rich", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([ASKED], 0, "no known vulnerabilities in 1"),
        ([ASKED, SKIPPED], 0, "not asked about: rich"),
        ([ASKED, SKIPPED, SKIPPED], 0, "skipped: 2 of 3"),
        ([{**ASKED, "vulns": [FLAW]}, SKIPPED, SKIPPED], 1, "torch 1.0: PYSEC-1, fixed in 2.0"),
    ],
)
def test_the_audit_tells_skipped_from_safe(packages, code, said):
    answer = tool("audit").verdict({"dependencies": packages})
    assert answer[0] == code and said in answer[1][0]


@pytest.mark.parametrize("said", ["", "ConnectionError", "[]", "{}"])
def test_no_answer_is_no_verdict(said):
    assert tool("audit").parse(said) is None
    assert tool("audit").parse('{"dependencies": []}') == {"dependencies": []}
