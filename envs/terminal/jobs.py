"""The jobs of the terminal: files, what to do with them, and what hidden checks find after that."""

import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, TypeAlias

WORDS = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "iris",
    "jade",
    "kelp",
    "lotus",
    "maple",
)
CITIES = ("Bergen", "Cork", "Delft", "Graz", "Turin")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Job(NamedTuple):
    """A job, which is done when each expression in `expect` has its value."""

    prompt: str
    files: dict[str, str]
    expect: dict[str, Any]
    solution: str
    """A shell command that does the job."""
    prepare: str = ""
    """A shell command that runs before the session."""


Kind: TypeAlias = Callable[[Random], Job]


def count(rng: Random) -> Job:
    """Create a job: count lines of logs in several folders."""
    files: dict[str, str] = {}
    for service in rng.sample(WORDS, 3):
        for day in range(1, 4):
            lines = [f"2031-05-0{day} {rng.choice(LEVELS)} {_word(rng)} ERROR" for _ in range(rng.randint(9, 30))]
            files[f"logs/{service}/0{day}.{rng.choice(['log', 'log', 'old'])}"] = _text(lines)
    lines = [line for path, text in files.items() if path.endswith(".log") for line in text.splitlines()]
    found = sum(line.split()[1] == "ERROR" for line in lines)
    return Job(
        "Lines of a log are: day, level, words. Count the lines of the level ERROR in all .log files below logs/, and "
        "write the number to answer.txt.",
        files,
        {"text('answer.txt').strip()": str(found)},
        "grep -rhE --include='*.log' '^[^ ]+ ERROR ' logs | wc -l > answer.txt",
    )


def find(rng: Random) -> Job:
    """Create a job: find the largest of the files that contain a word."""
    wanted = rng.choice(WORDS)
    sizes = rng.sample(range(20, 400), 12)
    paths = [f"data/{_word(rng)}/{place}.txt" for place in range(12)]
    has_it = dict(zip(paths, [True] * 5 + [False] * 7, strict=True))
    files = {
        path: f"{wanted if has_it[path] else 'nothing'}\n" + "-" * size + "\n"
        for path, size in zip(paths, sizes, strict=True)
    }
    largest = max((path for path in paths if has_it[path]), key=lambda path: len(files[path]))
    return Job(
        f"Several files below data/ have the word {wanted} in them. Write the path of the largest of those to "
        "answer.txt, as in data/folder/file.txt.",
        files,
        {"os.path.normpath(text('answer.txt').strip())": largest},
        f"ls -S $(grep -rlw {wanted} data) | head -n 1 > answer.txt",
    )


def rename(rng: Random) -> Job:
    """Create a job: rename files without changing their content."""
    files = {
        f"photos/{_word(rng).title()} {place}.{rng.choice(['JPG', 'jpeg', 'png'])}": f"{rng.random()}\n"
        for place in range(10)
    }
    done = {path.removeprefix("photos/"): text for path, text in files.items()}
    done = {
        name if name.endswith("png") else f"{name.rpartition('.')[0].lower()}.jpg": text for name, text in done.items()
    }
    return Job(
        "Rename the pictures in photos/ that end in .JPG or .jpeg: the ending becomes .jpg, and the rest of the name "
        "lower case. Leave all others as they are.",
        files,
        {"texts('photos')": done},
        'cd photos && for f in *.JPG *.jpeg; do [ ! -e "$f" ] || mv "$f" "$(echo "${f%.*}" | tr A-Z a-z).jpg"; done',
    )


def permit(rng: Random) -> Job:
    """Create a job: set the permissions of programs and keys."""
    endings = ["sh", "sh", "key", "key", "txt", *rng.choices(["sh", "key", "txt"], k=5)]
    files = {f"bin/{_word(rng)}{place}.{ending}": "x\n" for place, ending in enumerate(endings)}
    wanted = {"sh": rng.choice([0o750, 0o755, 0o700]), "key": rng.choice([0o600, 0o640]), "txt": 0o644}
    modes = {path.removeprefix("bin/"): wanted[path.rpartition(".")[2]] for path in files}
    return Job(
        f"Set the permissions of the .sh files in bin/ to {wanted['sh']:o} and those of the .key files to "
        f"{wanted['key']:o}. Leave all others as they are.",
        files,
        {"modes('bin')": modes},
        f"chmod {wanted['sh']:o} bin/*.sh; chmod {wanted['key']:o} bin/*.key",
        prepare="chmod 644 bin/*",
    )


def extract(rng: Random) -> Job:
    """Create a job: restore one folder from an archive."""
    folders = rng.sample(WORDS, 4)
    names = rng.sample(WORDS, 3)
    files = {f"made/{folder}/{name}.txt": f"{rng.random()}\n" for folder in folders for name in names}
    wanted = rng.choice(folders)
    return Job(
        f"Unpack the files of the folder {wanted} in backup.tar.gz into restored/, as restored/FILE, and nothing else.",
        files,
        {"texts('restored')": {f"{name}.txt": files[f"made/{wanted}/{name}.txt"] for name in names}},
        f"mkdir restored && tar -xzf backup.tar.gz -C restored --strip-components=2 made/{wanted}",
        prepare="tar -czf backup.tar.gz made && rm -r made",
    )


def configure(rng: Random) -> Job:
    """Create a job: change one setting in one section."""
    sections = rng.sample(WORDS, 4)
    ports = {section: rng.randint(2000, 9999) for section in sections}
    wanted, port = rng.choice(sections), rng.randint(10_000, 60_000)

    def shown(ports: dict[str, int]) -> str:
        return "\n".join(f"[{section}]\nhost = {section}.local\nport = {ports[section]}\n" for section in sections)

    return Job(
        f"Set the port of the section {wanted} in etc/app.ini to {port}. Leave all else as it is.",
        {"etc/app.ini": shown(ports), "etc/app.ini.orig": shown(ports)},
        {"texts('etc')": {"app.ini": shown(ports | {wanted: port}), "app.ini.orig": shown(ports)}},
        rf"sed -i '/^\[{wanted}\]/,/^$/ s/^port = .*/port = {port}/' etc/app.ini",
    )


def select(rng: Random) -> Job:
    """Create a job: select a column of some rows of a table."""
    city = rng.choice(CITIES)
    rows = [(_word(rng), rng.choice(CITIES), rng.choice(["yes", "no"])) for _ in range(60)]
    found = sorted({f"{name}@example.com" for name, place, active in rows if (place, active) == (city, "yes")})
    return Job(
        f"users.csv has the columns email, city and active. Write the email of each active user of {city} to "
        "emails.txt, one a line, sorted, each once.",
        {"users.csv": _text(["email,city,active", *(f"{name}@example.com,{a},{b}" for name, a, b in rows)])},
        {"text('emails.txt')": _text(found)},
        f"grep ',{city},yes$' users.csv | cut -d, -f1 | LC_ALL=C sort -u > emails.txt",
    )


def replace(rng: Random) -> Job:
    """Create a job: replace a word in some files, but not within longer words."""
    old, new = rng.sample(WORDS, 2)
    files = {
        f"docs/{_word(rng)}{place}.{ending}": _text([f"{rng.choice(WORDS)} {old} {old}s {rng.random()}"] * 3)
        for place, ending in enumerate(["md", "md", "md", "txt", "txt"])
    }
    changed = {
        path.removeprefix("docs/"): re.sub(rf"\b{old}\b", new, text) if path.endswith("md") else text
        for path, text in files.items()
    }
    return Job(
        f"Replace the word {old} by {new} in all .md files of docs/, but leave longer words such as {old}s. Leave all "
        "other files as they are.",
        files,
        {"texts('docs')": changed},
        rf"sed -i 's/\b{old}\b/{new}/g' docs/*.md",
    )


KINDS: tuple[Kind, ...] = (count, find, rename, permit, extract, configure, select, replace)


def _word(rng: Random) -> str:
    return "".join(rng.choices("bcdfghklmnprstvz", k=2)) + rng.choice(WORDS)


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
