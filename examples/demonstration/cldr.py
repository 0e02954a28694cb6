"""A parallel corpus built from the Unicode CLDR data that Babel ships. Nothing is downloaded.

Each pair is one value (a date, an amount of money, a distance, ...) that Babel formats in two
locales, so CLDR's translators chose the target, with its word order and plural forms. Bare names
(of countries, languages, currencies) go to the training split only. A model cannot guess the German
name of a country that it has never seen, but it can build "3 weeks ago" and "Greek (Cyprus)" from
known parts."""

import datetime
import random
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from babel import Locale, UnknownLocaleError
from babel.dates import (
    format_date,
    format_skeleton,
    format_time,
    format_timedelta,
    get_datetime_format,
)
from babel.languages import get_official_languages
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_percent,
    get_territory_currencies,
)
from babel.units import format_unit

Formatter = Callable[[Locale], str]

TRAIN_PAIRS = 12_000
HELD_OUT_PAIRS = 500
STYLES: list[Literal["full", "long"]] = ["full", "long"]
LENGTHS: list[Literal["long", "short"]] = ["long", "short"]
SECONDS: dict[Literal["day", "hour", "minute", "second", "week", "month", "year"], int] = {
    "second": 1,
    "minute": 60,
    "hour": 3600,
    "day": 24 * 3600,
    "week": 7 * 24 * 3600,
    "month": 30 * 24 * 3600,
    "year": 365 * 24 * 3600,
}
# The members of the European Union and of the G20, and some of their neighbours.
COUNTRIES = (
    "AR AT AU BE BG BR CA CH CN CY CZ DE DK EE EG ES FI FR GB GR HR HU ID IE IN IS IT JP KR LT LU "
    "LV MT MX NL NO PL PT "
    "RO RS RU SA SE SI SK TR UA US ZA"
)
UNITS = (
    "area-hectare area-square-kilometer duration-hour duration-minute duration-month "
    "duration-second duration-week "
    "duration-year energy-kilocalorie energy-kilowatt-hour length-centimeter length-foot "
    "length-kilometer length-mile "
    "mass-gram mass-kilogram mass-tonne power-watt speed-kilometer-per-hour speed-mile-per-hour "
    "temperature-celsius "
    "temperature-fahrenheit volume-cubic-meter volume-liter digital-gigabyte"
).split()


class Pair(NamedTuple):
    """One sentence in both languages."""

    source: str
    target: str


class Corpus(NamedTuple):
    """Three splits of pairs. No source sentence occurs twice, within a split or in two of them."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def build_corpus(
    source_lang: str = "en",
    target_lang: str = "de",
    train_pairs: int = TRAIN_PAIRS,
    held_out_pairs: int = HELD_OUT_PAIRS,
    seed: int = 0,
) -> Corpus:
    """Build the corpus: at most `train_pairs` for training, `held_out_pairs` each for validation
    and test.

    The same arguments give the same sentences in the same order on every machine with the same
    Babel.

    Raises:
        ValueError: Babel has no locale with that name, or both names are the same.
    """
    if source_lang == target_lang:
        raise ValueError(
            f"source_lang and target_lang are both {source_lang!r}: a parallel corpus needs two "
            "languages"
        )
    source, target = parse_locale(source_lang), parse_locale(target_lang)
    rng = random.Random(seed)
    names = _distinct_pairs(_bare_names(source, target), source, target, seen=set())
    seen = {pair.source for pair in names}
    wanted = train_pairs + 2 * held_out_pairs - min(len(names), train_pairs)
    composed = _distinct_pairs(
        _composed_values(rng, source, target), source, target, seen, limit=wanted
    )
    test, validation = composed[:held_out_pairs], composed[held_out_pairs : 2 * held_out_pairs]
    train = (names + composed[2 * held_out_pairs :])[:train_pairs]
    rng.shuffle(train)
    return Corpus(train, validation, test)


def parse_locale(name: str) -> Locale:
    """The Babel locale called `name` ("de", "pt_BR"). Raises ValueError when there is none."""
    try:
        return Locale.parse(name)
    except (UnknownLocaleError, ValueError):
        raise ValueError(
            f"the built-in corpus has no language {name!r}: use a CLDR locale such as de"
        ) from None


def _distinct_pairs(
    values: Iterator[Formatter],
    source: Locale,
    target: Locale,
    seen: set[str],
    limit: int | None = None,
) -> list[Pair]:
    """Format values in both locales, until `limit` pairs are found.

    Repeated source sentences are skipped.
    """
    pairs: list[Pair] = []
    for formatter in values:
        if limit is not None and len(pairs) >= limit:
            break
        pair = Pair(_plain_spaces(formatter(source)), _plain_spaces(formatter(target)))
        if pair.source in seen or not (pair.source and pair.target):
            continue
        seen.add(pair.source)
        pairs.append(pair)
    return pairs


def _plain_spaces(text: str) -> str:
    """Replace CLDR's spaces of various widths (U+00A0, U+202F, U+2009) with plain ones, for
    tokenizer and metric.
    """
    return re.sub(r"\s+", " ", text).strip()


def _territories() -> list[str]:
    return list(COUNTRIES.split())


def _languages(*locales: Locale) -> list[str]:
    """Return the countries' official languages with a plain name in all locales: not "Norwegian
    (Nynorsk)".
    """
    codes = {
        code
        for country in _territories()
        for code in get_official_languages(country, de_facto=True)
    }
    return sorted(
        code
        for code in codes
        if all("(" not in locale.languages.get(code, "(") for locale in locales)
    )


def _currencies() -> list[str]:
    """Return the countries' currencies on a fixed day, so that the corpus does not change with the
    calendar.
    """
    day = datetime.date(2025, 1, 1)
    return sorted(
        {code for country in _territories() for code in get_territory_currencies(country, day)}
    )


def _bare_names(*locales: Locale) -> Iterator[Formatter]:
    """Yield every name alone: countries, languages, currencies, months, days of the week."""
    yield from (lambda locale, c=code: locale.territories[c] for code in _territories())
    yield from (lambda locale, c=code: locale.languages[c] for code in _languages(*locales))
    yield from (lambda locale, c=code: locale.currencies[c] for code in _currencies())
    yield from (
        lambda locale, m=month: locale.months["stand-alone"]["wide"][m] for month in range(1, 13)
    )
    yield from (lambda locale, d=day: locale.days["stand-alone"]["wide"][d] for day in range(7))


def _composed_values(rng: random.Random, *locales: Locale) -> Iterator[Formatter]:
    """Yield an endless, seeded stream of values. Each kind is drawn equally often."""
    territories, languages, currencies = _territories(), _languages(*locales), _currencies()
    makers: list[Callable[[], Formatter]] = [
        lambda: _date(rng),
        lambda: _date_and_time(rng),
        lambda: _relative_time(rng),
        lambda: _unit(rng),
        lambda: _money(rng, currencies),
        lambda: _number(rng),
        lambda: _language_in_country(rng, languages, territories),
    ]
    while True:
        yield rng.choice(makers)()


def _random_moment(rng: random.Random) -> datetime.datetime:
    """Return a full hour in the years 1990 to 2039."""
    first, last = datetime.date(1990, 1, 1).toordinal(), datetime.date(2039, 12, 31).toordinal()
    day = datetime.date.fromordinal(rng.randint(first, last))
    return datetime.datetime.combine(day, datetime.time(rng.randrange(24)))


def _date(rng: random.Random) -> Formatter:
    day = _random_moment(rng)
    form = rng.choice([*STYLES, "MMMMd", "yMMMM", "MMMEd", "yQQQQ", "GyMMMd"])
    if form in STYLES:
        return lambda locale: format_date(day, form, locale=locale)
    return lambda locale: format_skeleton(form, day, locale=locale)


def _date_and_time(rng: random.Random) -> Formatter:
    moment, form = _random_moment(rng), rng.choice(STYLES)
    # format_datetime() would add seconds and the time zone to longer dates. People write the short
    # time.
    return lambda locale: (
        str(get_datetime_format(form, locale=locale))
        .replace("'", "")
        .replace("{0}", format_time(moment, "short", locale=locale))
        .replace("{1}", format_date(moment, form, locale=locale))
    )


def _relative_time(rng: random.Random) -> Formatter:
    unit, seconds = rng.choice(list(SECONDS.items()))
    delta = datetime.timedelta(seconds=rng.choice([-1, 1]) * rng.randrange(1, 100) * seconds)
    # This high threshold keeps the unit: Babel would round up to the next larger one.
    return lambda locale: format_timedelta(
        delta, unit, threshold=10_000, add_direction=True, locale=locale
    )


def _unit(rng: random.Random) -> Formatter:
    unit, amount, length = rng.choice(UNITS), rng.randrange(1, 100), rng.choice(LENGTHS)
    return lambda locale: format_unit(amount, unit, length, locale=locale)


def _money(rng: random.Random, currencies: list[str]) -> Formatter:
    amount, currency = rng.randrange(1, 100), rng.choice(currencies)
    return lambda locale: format_currency(
        amount, currency, locale=locale, format_type="name", currency_digits=False
    )


def _number(rng: random.Random) -> Formatter:
    amount = rng.randrange(1, 100)
    if rng.random() < 0.25:
        return lambda locale: format_percent(amount / 100, locale=locale)
    count = amount * 10 ** rng.choice([3, 6, 9, 12])
    return lambda locale: format_compact_decimal(count, format_type="long", locale=locale)


def _language_in_country(
    rng: random.Random, languages: list[str], territories: list[str]
) -> Formatter:
    language, territory = rng.choice(languages), rng.choice(territories)
    return lambda locale: f"{locale.languages[language]} ({locale.territories[territory]})"
