-- Drafts of the model only: copies are tokens of the target and need no n-gram.
SELECT run, count(*) AS judged, count(*) FILTER (outcome = 'accepted') AS accepted,
    count(*) FILTER (translation = 'ngram') AS judged_hits,
    count(*) FILTER (translation = 'ngram' AND outcome = 'accepted') AS accepted_hits
FROM decisions WHERE drafter = 'model' AND outcome IN ('accepted', 'rejected') GROUP BY run ORDER BY run
