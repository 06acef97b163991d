"""Parses HTML pages and checks their form."""

from html.parser import HTMLParser

VOID = ("meta",)


class Page(HTMLParser):
    """Checks that elements end in order, and collects the rows of the tables, numbers and attributes of a page.

    Attributes:
      open: elements that have not ended.
      rows: the texts of the cells of each row of all tables.
      attributes: the attributes of all elements.
      tags: the names of all elements.
      values: the exact numbers of `data` elements.
      texts: all texts outside of tables and styles.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()
        self.values: list[float] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "data":
            self.values.append(float(dict(attrs)["value"] or "nan"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif "style" not in self.open:
            self.texts.append(data)


def check_alone(text: str) -> Page:
    """Check that a page is well-formed, self-contained and without scripts, and has both themes. Return it parsed."""
    page = Page(text)
    assert not page.open
    assert page.tags.isdisjoint({"script", "link", "iframe", "object", "embed"})
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action", "srcset")]
    assert all(link is not None and link.startswith("#") for link in links), links  # parts of the pictures
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")
    light, _, dark = text.partition("prefers-color-scheme: dark")
    for name in ("--text", "--back", "--line", "--head", "--c0", "--c5"):
        assert f"{name}: #" in light.rpartition(":root")[2]
        assert f"{name}: #" in dark.partition("}\n}")[0]
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    return page
