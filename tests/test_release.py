"""What goes with a release: bill of materials, vulnerabilities, packages, images, workflows."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

import symmerge

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


ROOT = TOOLS.parent


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert project["version"] == symmerge.__version__ == str(citation["version"])
    assert project["license"] == citation["license"]
    assert project["name"] in project["scripts"]  # `pipx run symmerge`


def test_the_citation_has_the_fields_that_its_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"]
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    for paper in citation["references"]:
        assert {"type", "title", "authors"} <= paper.keys()
        assert all(
            re.fullmatch(r"arXiv:\d{4}\.\d{5}", one["value"]) for one in paper["identifiers"]
        )


@pytest.mark.parametrize("name", ["test", "release"])
def test_workflows_use_targets_that_exist(name):
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    jobs = yaml.safe_load(text)["jobs"].values()
    asked = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    made = [line.split()[1] for line in asked if line.startswith("make ")]
    assert made and {*made} <= {*targets}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_images_copy_what_exists_and_is_sent(name):
    text, sent = (ROOT / name).read_text("utf-8"), (ROOT / ".dockerignore").read_text("utf-8")
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
    copied = [file for line in lines for file in line.split()]
    assert "src" in copied and all((ROOT / file).exists() for file in copied)
    assert {f"!{file}" for file in copied} <= {*sent.splitlines()}


def test_every_extra_of_the_documents_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").open()}
    for need in (*extras["docs"], *extras["dist"], *extras["dev"]):
        assert re.match(r"[\w-]+", need)[0].lower() in pinned, need


def test_a_wheel_without_its_data_is_noticed():
    tool_names = [*tool("dist").NEEDED, "symmerge/__init__.py"]
    assert tool("dist").complaints(tool_names) == []
    assert tool("dist").complaints(tool_names[1:]) == [f"{tool_names[0]} is missing"]
    assert tool("dist").complaints([*tool_names, "tests/x.py"]) == ["tests/x.py is in it"]
