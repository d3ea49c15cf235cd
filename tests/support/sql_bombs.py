"""Sixty queries that take far longer than a visitor's time limit, or far more memory than there is.

DuckDB looks at its interrupt between two steps of a query, so many of these would run on after it: one huge value, one
function over a huge list, one plan of thousands of columns.
"""

_A, _B = "repeat('a', 200000)", "repeat('b', 200000)"
_BIG = "range(300000000)"
_PRODUCT = "range(1000000) a, range(1000000) b"

# Functions of two texts whose time is the product of their lengths.
_TEXTS = {name: f"SELECT {name}({_A}, {_B})" for name in ("levenshtein", "damerau_levenshtein", "editdist3")} | {
    name: f"SELECT {name}(repeat('ab', 2000000), repeat('ba', 2000000))"
    for name in ("jaro_similarity", "jaro_winkler_similarity")
}

# One value of gigabytes, made by one call.
_VALUES = {
    "repeat": "SELECT length(repeat('a', 4000000000))",
    "repeat of repeat": "SELECT length(repeat(repeat('a', 100000), 40000))",
    "lpad": "SELECT length(lpad('a', 2000000000, 'b'))",
    "rpad": "SELECT length(rpad('a', 2000000000, 'b'))",
    "printf": "SELECT length(printf('%2000000000d', 1))",
    "format": "SELECT length(format('{:>2000000000}', 1))",
    "concat": "SELECT length(concat(" + ", ".join(["repeat('a', 400000000)"] * 8) + "))",
    "hex": "SELECT length(hex(repeat('a', 1000000000)))",
    "base64": "SELECT length(to_base64(repeat('a', 1000000000)::BLOB))",
    "md5": "SELECT md5(repeat('a', 3000000000))",
    "sha256": "SELECT sha256(repeat('a', 3000000000))",
    "reverse": "SELECT length(reverse(repeat('a', 2000000000)))",
    "replace": "SELECT length(replace(repeat('a', 50000000), 'a', repeat('b', 100)))",
    "translate": "SELECT length(translate(repeat('a', 500000000), 'a', 'b'))",
    "upper": "SELECT length(upper(repeat('ä', 1000000000)))",
    "split": "SELECT len(string_split(repeat('a,', 100000000), ','))",
    "split by pattern": "SELECT len(string_split_regex(repeat('a,', 100000000), ','))",
    "aggregate of texts": "SELECT length(string_agg(repeat('a', 1000), '')) FROM range(10000000)",
    "bits": "SELECT length(bitstring('1', 2000000000))",
}

# One list or nested value of hundreds of millions of elements.
_LISTS = {
    "sort": f"SELECT len(list_sort({_BIG}))",
    "reverse sort": f"SELECT len(list_reverse_sort({_BIG}))",
    "distinct": f"SELECT len(list_distinct({_BIG}))",
    "reduce": "SELECT list_reduce(range(100000000), lambda x, y: x + y)",
    "transform": f"SELECT len(list_transform({_BIG}, lambda x: x * x))",
    "filter": f"SELECT len(list_filter({_BIG}, lambda x: x % 2 = 0))",
    "sum": f"SELECT list_sum({_BIG})",
    "aggregate": f"SELECT list_aggregate({_BIG}, 'histogram')",
    "contains": "SELECT list_has_any(range(100000000), range(100000000, 200000000))",
    "flatten": "SELECT len(flatten(list_transform(range(100000), lambda x: range(10000))))",
    "list of rows": f"SELECT len(list(a.range)) FROM {_PRODUCT}",
    "map": "SELECT cardinality(map_from_entries(list_transform(range(50000000), lambda x: (x, x))))",
    "join of a list": f"SELECT length(array_to_string({_BIG}, ','))",
    "JSON": f"SELECT length(to_json({_BIG})::VARCHAR)",
    "unnest": "SELECT sum(n) FROM (SELECT unnest(range(100000000)) AS n, unnest(range(100000000)))",
    "slices": "SELECT len(list_transform(range(100000), lambda x: list_sort(range(100000))))",
}


def _double(number: int, query: str) -> str:
    """A table of a WITH clause, twice what the one before it is."""
    return f"t{number} AS NOT MATERIALIZED ({query.format(f't{number - 1}') if number else 'FROM range(2)'})"


# Plans: nothing runs until DuckDB is done with them.
_PLANS = {
    "union": " UNION ALL ".join(["SELECT 1"] * 3400),
    "columns": "SELECT " + ", ".join(["1"] * 21_800),
    "stars": "SELECT " + ", ".join(["prompts.*"] * 5_000) + " FROM prompts",
    "stars of a product": "SELECT " + ", ".join(["*"] * 2_000) + " FROM prompts a, prompts b, prompts c",
    "joins": "SELECT count(*) FROM " + ", ".join(f"prompts t{number}" for number in range(400)),
    "outer joins": "SELECT count(*) FROM range(1000) t0 "
    + " ".join(f"FULL JOIN range(1000) t{number} ON t{number}.range < t0.range" for number in range(1, 30)),
    "grouping sets": "SELECT count(*) FROM range(10) GROUP BY CUBE ("
    + ", ".join(f"range + {number}" for number in range(15))
    + ")",
    "tables of products": "WITH "
    + ", ".join(_double(number, "SELECT 1 FROM {0} a, {0} b") for number in range(20))
    + " SELECT count(*) FROM t19",
    "tables of unions": "WITH "
    + ", ".join(_double(number, "SELECT * FROM {0} UNION ALL SELECT * FROM {0}") for number in range(24))
    + " SELECT count(*) FROM t23",
    "windows": "SELECT "
    + ", ".join(f"sum(range + {n}) OVER (ORDER BY range % {n + 2})" for n in range(900))
    + " FROM range(100000)",
    "conditions": "SELECT count(*) FROM range(1000000000) WHERE "
    + " OR ".join(f"range % {n} = 1" for n in range(2, 900)),
    "IN": "SELECT count(*) FROM range(1000000000) WHERE range * range IN (" + ", ".join(map(str, range(10_000))) + ")",
}

# Many rows.
_ROWS = {
    "product": f"SELECT count(*) FROM {_PRODUCT}",
    "product of three": "SELECT count(*) FROM range(100000) a, range(100000) b, range(100000) c",
    "recursion": "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
    "sorted product": f"SELECT a.range + b.range AS n FROM {_PRODUCT} ORDER BY n DESC LIMIT 1",
    "windows": f"SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY a.range * b.range) AS n FROM {_PRODUCT})",
    "patterns": "SELECT count(*) FROM range(1000000000) WHERE regexp_matches(range::VARCHAR, '(1|2|3)*4(5|6)*7')",
    "groups": f"SELECT count(*) FROM (SELECT a.range * b.range AS n FROM {_PRODUCT} GROUP BY n)",
    "distinct rows": f"SELECT count(DISTINCT a.range * b.range) FROM {_PRODUCT}",
}

BOMBS = {
    f"{kind}: {name}": query
    for kind, queries in (
        ("texts", _TEXTS),
        ("value", _VALUES),
        ("list", _LISTS),
        ("plan", _PLANS),
        ("rows", _ROWS),
    )
    for name, query in queries.items()
}
