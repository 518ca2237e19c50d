"""Plain text with a permissive licence: Python's standard library and what installed packages document."""

import ast
import gzip
import html
import importlib.metadata
import json
import pathlib
import re

PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|MIT-CMU|Unlicense", re.I)
COPYLEFT = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL", re.I)


def docstrings(root: pathlib.Path):
    """Documents of one package: each module's docstrings under their qualified names and signatures."""
    for path in sorted(root.rglob("*.py")):
        if {"tests", "test", "testing", "_vendor", "vendored"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(errors="strict"))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        module = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        parts = []
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                name = getattr(node, "name", "")
                args = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                parts.append(f"## {module}{'.' + name if name else ''}{args[:200]}\n\n{text}\n")
        if parts:
            yield "\n".join(parts)


def service_docs(root: pathlib.Path):
    """Documents of botocore's service models: what each operation and each of its parameters does."""
    newest = {path.parent.parent: path for path in sorted(root.glob("data/*/*/service-2.json.gz"))}
    for path in newest.values():
        model = json.loads(gzip.decompress(path.read_bytes()))
        parts, size = [], 0
        for name, operation in model["operations"].items():
            members = model["shapes"].get(operation.get("input", {}).get("shape"), {}).get("members", {})
            lines = [f"- {k}: {m['documentation']}" for k, m in members.items() if m.get("documentation")]
            text = "\n".join([f"## {path.parent.parent.name}.{name}\n", operation.get("documentation", ""), *lines])
            text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"</?p>\s*", "\n", text)))
            text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()
            parts, size = [*parts, text], size + len(text)
            if size > 8_000:
                yield "\n\n".join(parts)
                parts, size = [], 0
        if parts:
            yield "\n\n".join(parts)


def packages(site: pathlib.Path):
    """(name, licence, import roots) of the distributions in `site` whose metadata states a permissive licence."""
    for dist in sorted(importlib.metadata.distributions(path=[str(site)]), key=lambda d: d.metadata["Name"].lower()):
        meta = dist.metadata
        licence = (
            meta.get("License-Expression")
            or "; ".join(c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith("License"))
            or (meta.get("License") or "").split("\n")[0]
        )
        if not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
            continue
        tops = sorted({f.parts[0] for f in dist.files or () if len(f.parts) > 1 and f.suffix == ".py"})
        yield meta["Name"], licence, [site / t for t in tops if (site / t).is_dir() and t[0] not in ".."]


def stdlib():
    """(path, source) of the standard library of the running Python, tests left out."""
    root = pathlib.Path(ast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idle_test", "lib2to3", "__phello__", "encodings"} & set(parts):
            text = path.read_text(errors="replace")
            if len(text) > 200:
                yield "/".join(parts), text
