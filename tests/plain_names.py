"""Plain names and words in the source: ``python tests/plain_names.py src/fedsim`` lists what a reader must guess.

A local name such as ``found`` or ``how`` says nothing of the thing; a function's reader must go back to where it is
bound. So it is with annotated fields of classes. Programs do not say, tell or know, and no part of one is somebody.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

VAGUE = frozenset(
    {
        "alone", "asked", "both", "far", "few", "following", "found", "given", "here", "how", "known", "mine",
        "near", "of", "one", "other", "others", "own", "rest", "said", "same", "says", "there", "together", "told",
        "what", "where", "which", "whose",
    }
)  # fmt: skip
VAGUE_FIELDS = VAGUE - {"found", "known", "others", "own", "rest", "where"}
"""their object says what they are of: ``plan.rest``, ``room.where``"""
ASKING = re.compile(r"(What|Who|Return what|Yield what)\b")
WORDS = re.compile(r"\b(nobody|somebody|anybody|everybody|whoever|tears?|tells?|told)\b", re.IGNORECASE)


def vague_names(source):
    """Yield line and name of each local, argument, loop variable or annotated field that names no thing."""
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, ast.ClassDef):
            for node in scope.body:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in VAGUE_FIELDS:
                    yield node.lineno, node.target.id
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(scope):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names = [node.id]
                elif isinstance(node, ast.arg):
                    names = [node.arg]
                elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                    names = [node.name]
                else:
                    continue
                yield from ((node.lineno, name) for name in names if name in VAGUE)


def words(source):
    """Yield line and word of comments and texts that make a person of a program."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for match in WORDS.finditer(token.string):
                yield token.start[0] + token.string[: match.start()].count("\n"), match[0]


def asking_docstrings(source):
    """Yield line and beginning of each docstring that asks in place of naming the thing: ``Return what is wrong``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = ASKING.match(ast.get_docstring(node) or "")
            if match:
                yield node.body[0].lineno, match[0]


def findings(folder):
    """Return a line for each name and word in the Python files of a folder."""
    lines = []
    for path in sorted(Path(folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines += [f"{path}:{line}: {name}" for line, name in sorted({*vague_names(source), *words(source)})]
    return lines


if __name__ == "__main__":
    found_lines = [line for folder in sys.argv[1:] for line in findings(folder)]
    sys.stdout.write("".join(f"{line}\n" for line in found_lines))
    sys.exit(bool(found_lines))
