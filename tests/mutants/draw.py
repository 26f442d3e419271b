"""Mutants of the code that decides, stores and restores, drawn by a seed."""

import ast
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

FOLDERS = (
    "trainvitals/policy",
    "trainvitals/detect",
    "trainvitals/io",
    "trainer_hooks/step",
    "trainer_hooks/guard",
    "trainer_hooks/recovery",
    "trainer_hooks/data",
    "collector/vitals_collector/ingest",
    "collector/vitals_collector/numbers",
    "collector/vitals_collector/alerts",
)
LEFT_OUT = re.compile(
    # They need the names of variables.
    "core/Variable|"
    # They raise TypeError for nearly every operand: any test notices that.
    "core/ReplaceBinaryOperator_.*_(Pow|FloorDiv|RShift|LShift|BitOr|BitAnd|BitXor)$|"
    "core/ReplaceBinaryOperator_Bit|"
    "core/ReplaceComparisonOperator_(Is|IsNot)_(?!Is)|"
    "core/ReplaceComparisonOperator_(?!Is).*_(Is|IsNot)$|"
    "core/ReplaceUnaryOperator_.*_Invert$"
)


class Mutant(msgspec.Struct, frozen=True):
    """One change of one file."""

    path: str
    operator: str
    occurrence: int
    line: int
    sha256: str
    """Of the file before the change."""

    @property
    def name(self) -> str:
        """Stable name, also of the same change in another checkout with the same file."""
        operator = self.operator.rpartition("/")[2]
        return f"{self.path}:{self.line} {operator} #{self.occurrence} {self.sha256[:8]}"

    def apply(self, source: str) -> str:
        """Return the changed source.

        Raises:
            ValueError: the source is not the one that the mutant was drawn from.
        """
        if digest(source) != self.sha256:
            raise ValueError(f"{self.path} has changed since the mutant was drawn; draw again")
        code = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        assert code is not None, self.name
        return code


def digest(source: str) -> str:
    """Return the SHA-256 of a source."""
    return hashlib.sha256(source.encode()).hexdigest()


def draw(root: Path, num: int, seed: int) -> list[Mutant]:
    """Draw mutants: first a place in the code, each equally likely, then one of its changes."""
    by_place: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for place, mutant in candidates(root, path):
                by_place[place].append(mutant)
    rng = random.Random(seed)
    mutants: list[Mutant] = []
    for place in rng.sample(sorted(by_place), len(by_place)):
        mutant = rng.choice(by_place[place])
        if len(mutants) == num:
            break
        if compiles(mutant.apply((root / mutant.path).read_text())):
            mutants.append(mutant)
    return mutants


def compiles(source: str) -> bool:
    """Return whether a source is Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def candidates(root: Path, path: Path) -> Iterator[tuple[tuple[str, int, int], Mutant]]:
    """Yield the place and each change of a file that can change what it does."""
    source = path.read_text()
    name, sha256 = path.relative_to(root).as_posix(), digest(source)
    inert = set(lines_without_effect(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for operator in sorted(name for name in operator_names() if not LEFT_OUT.match(name)):
        mutation = get_operator(operator)()
        places = (place for node in nodes for place in mutation.mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(places):
            if (line, column) not in inert and (line, None) not in inert:
                yield (name, line, column), Mutant(name, operator, occurrence, line, sha256)


def lines_without_effect(tree: ast.Module) -> Iterator[tuple[int, int | None]]:
    """Yield the places of annotations, and the lines of imports for type checkers."""
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in filter(None, annotations):
            for line in range(annotation.lineno, annotation.end_lineno + 1):
                first = annotation.col_offset if line == annotation.lineno else 0
                last = annotation.end_col_offset if line == annotation.end_lineno else 200
                yield from ((line, column) for column in range(first, last))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from ((line, None) for line in range(node.lineno, node.end_lineno + 1))
