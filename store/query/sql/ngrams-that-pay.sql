-- the 25 n-grams with the most accepted drafter pieces; without the n-gram each would have ended its block
WITH counted AS (
    SELECT
        run,
        target,
        proposed_id,
        any_value(proposed_bytes) AS proposed_bytes,
        any_value(pieces) AS pieces,
        count(*) AS judged,
        count(*) FILTER (outcome = 'accepted') AS accepted
    FROM decisions
    WHERE translation = 'ngram' AND outcome IN ('accepted', 'rejected')
    GROUP BY run, target, proposed_id
)

SELECT
    run,
    target,
    proposed_id,
    text_of(proposed_bytes) AS token,
    pieces,
    judged,
    accepted,
    accepted / judged AS acceptance_rate,
    accepted * len(pieces) AS accepted_pieces
FROM counted
WHERE accepted > 0
QUALIFY row_number() OVER (PARTITION BY run ORDER BY accepted_pieces DESC, target, proposed_id) <= 25
ORDER BY run, accepted_pieces DESC, target, proposed_id;
