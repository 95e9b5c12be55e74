"""The open table of rules, by primitive name."""

from collections.abc import Callable

from jax_deepcompile.ir.equation import Equation
from jax_deepcompile.partition.layout import RegionRule
from jax_deepcompile.partition.rules.base import OpRule, Rule, replicated_rule


class RuleRegistry:
    """Rules by primitive name; a later registration replaces an earlier one."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._regions: dict[str, RegionRule] = {}

    def register(self, *names: str) -> Callable[[Rule], Rule]:
        """Decorates ``rule(eqn) -> OpRule`` as the rule of the primitives ``names``, in the place of what they had."""

        def add(rule: Rule) -> Rule:
            self._rules |= dict.fromkeys(names, rule)
            return rule

        return add

    def register_region(self, name: str, rule: RegionRule) -> None:
        """Makes ``rule`` the rule of a primitive that holds jaxprs or places its operands itself."""
        self._regions[name] = rule

    def knows(self, name: str) -> bool:
        """Whether the primitive of that name has a rule."""
        return name in self._rules or name in self._regions

    def find(self, eqn: Equation) -> OpRule | RegionRule:
        """The rule of ``eqn``; without one it is computed whole on every device, and says so."""
        name = eqn.primitive.name
        if name in self._regions:
            return self._regions[name]
        if name in self._rules:
            return self._rules[name](eqn)
        return replicated_rule(eqn, reported=f"no rule for primitive '{name}'")


REGISTRY = RuleRegistry()
rule = REGISTRY.register
