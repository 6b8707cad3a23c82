r"""Completions with more than one final answer, `@A@` and `@B@`: none may be right for both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hedge:
    """A completion that does not decide."""

    name: str
    completion: str

    def of(self, one: str, other: str) -> str:
        """Return the completion for two candidates."""
        return self.completion.replace("@A@", one).replace("@B@", other)


HEDGES = [
    Hedge("two boxes", r"\boxed{@A@} or \boxed{@B@}"),
    Hedge("a box in a box", r"\boxed{\boxed{@A@} @B@}"),
    Hedge("a box that does not end", r"\boxed{@A@} \boxed{@B@"),
    Hedge("a box and text after it", r"\boxed{@A@} or @B@"),
    Hedge("a list in a box", r"\boxed{@A@, @B@}"),
    Hedge("a list with semicolons", r"\boxed{@A@; @B@}"),
    Hedge("a set in a box", r"\boxed{\{@A@, @B@\}}"),
    Hedge("a pair in a box", r"\boxed{(@A@, @B@)}"),
    Hedge("words in a box", r"\boxed{@A@ \text{ or } @B@}"),
    Hedge("an equation", r"\boxed{@A@ = @B@}"),
    Hedge("an assignment to each", r"\boxed{x = @A@, x = @B@}"),
    Hedge("an approximation", r"\boxed{@A@ \approx @B@}"),
    Hedge("a range", r"\boxed{@A@ \ldots @B@}"),
    Hedge("an interval", r"\boxed{[@A@, @B@]}"),
    Hedge("an inequality", r"\boxed{@A@ \le x \le @B@}"),
    Hedge("every number", r"\boxed{(-\infty, \infty)}"),
    Hedge("a variable", r"\boxed{x}"),
    Hedge("plus or minus", r"\boxed{\pm @A@}"),
    Hedge("lines in a box", r"\boxed{@A@ \\ @B@}"),
    Hedge("two formulas", r"It is $@A@$ or $@B@$"),
    Hedge("two sentences", r"The answer is @A@. The answer is @B@."),
    Hedge("text without a box", r"@A@ @B@"),
    Hedge("an undefined number", r"\boxed{\frac{0}{0}}"),
    Hedge("not a number", r"\boxed{\text{nan}}"),
    Hedge("an empty box", r"\boxed{}"),
    Hedge("an empty completion", ""),
    Hedge("cases", r"\boxed{\begin{cases} @A@ \\ @B@ \end{cases}}"),
    Hedge("a matrix", r"\boxed{\begin{pmatrix} @A@ & @B@ \end{pmatrix}}"),
    Hedge("a union", r"\boxed{\{@A@\} \cup \{@B@\}}"),
    Hedge("a logical or", r"\boxed{@A@ \lor @B@}"),
    Hedge("an element of a set", r"\boxed{x \in \{@A@, @B@\}}"),
    Hedge("words around both", r"\boxed{@A@ \text{ (or } @B@ \text{)}}"),
    Hedge("an answer that is hidden", r"\boxed{@A@\phantom{@B@}}"),
    Hedge("an empty box at the end", r"\boxed{@A@} \boxed{@B@} \boxed{}"),
    Hedge("a box in a comment", "\\boxed{@A@} % \\boxed{@B@}"),
    Hedge("a framed box as well", r"\boxed{@A@} \fbox{@B@}"),
    Hedge("a box without braces", r"\boxed{@A@} \boxed @B@"),
    Hedge("a ratio", r"\boxed{@A@ : @B@}"),
    Hedge("a bar", r"\boxed{@A@ | @B@}"),
    Hedge("units of each", r"\boxed{@A@ \text{ cm} = @B@ \text{ mm}}"),
]
