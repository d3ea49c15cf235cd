-- Counts by outcome first, because a filter per column would scan every decision several times.
WITH counted AS (
    SELECT run, "offset" // {window} AS number, translation = 'ngram' AS hit, outcome, count(*) AS decisions,
        min("offset") AS first, max("offset") AS last
    FROM decisions WHERE outcome = 'accepted' OR translation = 'ngram'
    GROUP BY ALL
)
SELECT run, min(first) AS first, max(last) AS last,
    coalesce(sum(decisions) FILTER (hit), 0) AS proposed,
    coalesce(sum(decisions) FILTER (hit AND outcome IN ('accepted', 'rejected')), 0) AS judged,
    coalesce(sum(decisions) FILTER (hit AND outcome = 'accepted'), 0) AS accepted,
    accepted / nullif(sum(decisions) FILTER (outcome = 'accepted'), 0) AS share
FROM counted GROUP BY run, number ORDER BY run, first
