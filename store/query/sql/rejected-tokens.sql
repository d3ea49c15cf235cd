-- the 25 target tokens rejected most often in each run, copied drafts included, and their most common replacement
WITH counted AS (
    SELECT
        run,
        target,
        proposed_id,
        coalesce(sum(decisions) FILTER (outcome = 'rejected'), 0)::BIGINT AS rejected,
        sum(decisions)::BIGINT AS judged
    FROM counts_by_token
    GROUP BY run, target, proposed_id
),

worst AS (
    SELECT *
    FROM counted
    WHERE rejected > 0
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY rejected DESC, target, proposed_id) <= 25
),

-- for these tokens only: their bytes, and their most common replacement
replacements AS (
    SELECT
        worst.run,
        worst.target,
        worst.proposed_id,
        emitted_id,
        min(proposed_bytes) AS proposed_bytes,
        min(emitted_bytes) AS emitted_bytes,
        sum(decisions) AS times
    FROM counts_by_token
    JOIN worst
        ON worst.run = counts_by_token.run
        AND worst.target = counts_by_token.target
        AND worst.proposed_id IS NOT DISTINCT FROM counts_by_token.proposed_id
    WHERE outcome = 'rejected'
    GROUP BY worst.run, worst.target, worst.proposed_id, emitted_id
    QUALIFY row_number() OVER (PARTITION BY worst.run, worst.target, worst.proposed_id ORDER BY times DESC, emitted_id) = 1
)

SELECT
    worst.run,
    worst.target,
    worst.proposed_id,
    text_of(proposed_bytes) AS proposed,
    rejected,
    judged,
    rejected / judged AS rejection_rate,
    replacements.emitted_id AS most_common_replacement_id,
    text_of(emitted_bytes) AS most_common_replacement
FROM worst
JOIN replacements
    ON replacements.run = worst.run
    AND replacements.target = worst.target
    AND replacements.proposed_id IS NOT DISTINCT FROM worst.proposed_id
ORDER BY worst.run, rejected DESC, worst.target, worst.proposed_id;
