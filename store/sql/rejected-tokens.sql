-- the 25 target tokens that were rejected most often in each run, and what came instead most often
WITH counted AS (
    SELECT
        run,
        proposed_id,
        any_value(proposed_bytes) AS proposed_bytes,
        count(*) FILTER (outcome = 'rejected') AS rejected,
        count(*) AS judged,
        mode(emitted_bytes) FILTER (outcome = 'rejected') AS replacement_bytes
    FROM decisions
    WHERE outcome IN ('accepted', 'rejected')
    GROUP BY run, proposed_id
)

SELECT
    run,
    proposed_id,
    text_of(proposed_bytes) AS proposed,
    rejected,
    judged,
    rejected / judged AS rejection_rate,
    text_of(replacement_bytes) AS most_common_replacement
FROM counted
WHERE rejected > 0
QUALIFY row_number() OVER (PARTITION BY run ORDER BY rejected DESC, proposed_id) <= 25
ORDER BY run, rejected DESC, proposed_id;
