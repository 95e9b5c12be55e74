"""What a module's source says: it is read and not run."""

import ast
from pathlib import Path


def source(path: Path) -> ast.Module:
    """The source of a file.

    Raises:
      OSError, SyntaxError, UnicodeDecodeError: it is none.
    """
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned(module: ast.Module) -> dict[str, ast.expr]:
    """What is assigned to which name, outside of functions and classes."""
    found = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id: statement.value for target in targets if isinstance(target, ast.Name)}
    return found


def called_with_nothing(module: ast.Module) -> list[str]:
    """The functions that need no arguments."""
    return [each.name for each in module.body if isinstance(each, ast.FunctionDef) and _needs_nothing(each.args)]


def _needs_nothing(args: ast.arguments) -> bool:
    return len(args.defaults) == len(args.posonlyargs + args.args) and None not in args.kw_defaults
