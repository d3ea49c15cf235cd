-- The cache's version counts insertions and evictions; with the entries at two versions both can be computed. Versions
-- within one stretch of the stream become one point.
WITH steps AS (
    SELECT run, target, version, "offset", cache_entries AS entries,
        cache_version - lag(cache_version) OVER before AS changed,
        cache_entries - lag(cache_entries) OVER before AS grown,
        (changed + grown) // 2 AS inserted,
        (changed - grown) // 2 AS evicted
    FROM versions
    WINDOW before AS (PARTITION BY run, target ORDER BY version)
)
SELECT run, target, max(version) AS version, max("offset") AS "offset", arg_max(entries, version) AS entries,
    sum(inserted) AS inserted, sum(evicted) AS evicted
FROM steps GROUP BY run, target, "offset" // {stretch} ORDER BY run, target, version
