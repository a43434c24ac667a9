"""Pre-commit hook: TOML and YAML files parse, and no file is larger than 200 kB."""

import sys
import tomllib
from pathlib import Path

import yaml

LIMIT = 200_000


def problem(path: Path) -> str | None:
    if path.stat().st_size > LIMIT:
        return f"{path}: larger than {LIMIT} bytes"
    try:
        if path.suffix == ".toml":
            tomllib.loads(path.read_text())
        elif path.suffix in {".yaml", ".yml"}:
            yaml.safe_load(path.read_text())
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        return f"{path}: {error}"
    return None


if __name__ == "__main__":
    problems = [text for name in sys.argv[1:] if (text := problem(Path(name)))]
    sys.stderr.write("".join(f"{text}\n" for text in problems))
    sys.exit(bool(problems))
