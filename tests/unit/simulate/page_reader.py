"""A report as a browser's parser sees it: elements nested as they are, nothing forgiven."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def all(self, name: str, **wanted: str) -> list[Element]:
        """Elements of that name inside, with these attributes (`class_`: one of its classes)."""
        kind = wanted.pop("class_", None)
        found = []
        for child in self.children:
            classes = child.attributes.get("class", "").split()
            if (
                child.name == name
                and (kind is None or kind in classes)
                and all(child.attributes.get(key) == value for key, value in wanted.items())
            ):
                found.append(child)
            found += child.all(name, **wanted, **({"class_": kind} if kind else {}))
        return found

    @property
    def text(self) -> str:
        return "".join(self.words) + "".join(child.text for child in self.children)

    def every(self) -> list[Element]:
        return [element for child in self.children for element in (child, *child.every())]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("root", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {self.get_starttag_text()}"
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].words.append(data)


def read_page(page: str) -> Element:
    """AssertionError where elements do not nest."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert [element.name for element in reader.open] == ["root"], "elements left open"
    return reader.open[0]
