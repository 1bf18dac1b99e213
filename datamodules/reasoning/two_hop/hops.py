"""Questions of two hops: what is the r2 of the r1 of e1?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hop:
    """A fact, as a question and as a statement.

    Attributes:
        question: Asks for the object: "Who is the author of The Silent Harbour?"
        phrase: Says what the object is, up to it: "the author of The Silent Harbour is".
        subject: What it is about, as `question` writes it.
        object: The answer.
        aliases: Other names of the object.
    """

    question: str
    phrase: str
    subject: str
    object: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The object's names, its own first."""
        return tuple(dict.fromkeys((self.object, *self.aliases)))

    @property
    def statement(self) -> str:
        """The fact as a sentence without its full stop."""
        return f"{self.phrase} {self.object}"


@dataclass(frozen=True)
class Chain:
    """Two facts, the object of the first being the subject of the second, and a question over both.

    Attributes:
        question: Asks for the second fact's object by the first one's subject, and does not name
            the entity between them.
        first: The fact about e1, whose object is the bridge entity e2.
        second: The fact about e2, whose object is the answer e3.
    """

    question: str
    first: Hop
    second: Hop


def end_of(subject: str, question: str) -> int:
    """Returns where the last mention of a subject ends in a question; its length without any."""
    start = question.rfind(subject)
    return len(question) if start < 0 else start + len(subject)
