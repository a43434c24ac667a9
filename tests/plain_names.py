"""Plain names and words in the source: ``python tests/plain_names.py src/fedsim`` lists what a reader must guess.

A local name such as ``found`` or ``how`` says nothing of the thing; a function's reader must go back to where it is
bound. So it is with annotated fields of classes. Programs do not say, tell or know, and no part of one is somebody.
In the first folder, few names may fit anything, such as ``text``: most have a better one, such as ``message``.
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
GENERAL = frozenset({"kind", "line", "place", "text"})
MOST_GENERAL = 3
"""of these per 100 functions: a ``line`` of a file has no better name"""
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
            yield from ((lineno, name) for lineno, name in bindings(scope) if name in VAGUE)


def bindings(scope):
    """Yield line and name of all arguments, locals and loop variables of a function, inner functions included."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.lineno, node.name


def general_names(source):
    """Return the number of functions, and a name for each argument or local that fits anything, once per function."""
    scopes = [s for s in ast.walk(ast.parse(source)) if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [name for scope in scopes for name in GENERAL & {name for _, name in bindings(scope)}]
    return len(scopes), names


def too_general(folder):
    """Return a line with the worst files if a folder has more than ``MOST_GENERAL`` general names per 100 functions."""
    counts = {path: general_names(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).rglob("*.py"))}
    functions, names = sum(num for num, _ in counts.values()), sum(len(found) for _, found in counts.values())
    if 100 * names <= MOST_GENERAL * functions:
        return []
    worst = sorted(counts, key=lambda path: -len(counts[path][1]))[:5]
    files = ", ".join(f"{path.relative_to(folder)} {len(counts[path][1])}" for path in worst if counts[path][1])
    share = f"{100 * names / functions:.1f} arguments and locals per 100 functions, at most {MOST_GENERAL}"
    return [f"{folder}: {', '.join(sorted(GENERAL))}: {share}; name the thing, first in {files}"]


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
    found_lines = [line for folder in sys.argv[1:] for line in findings(folder)] + too_general(sys.argv[1])
    sys.stdout.write("".join(f"{line}\n" for line in found_lines))
    sys.exit(bool(found_lines))
