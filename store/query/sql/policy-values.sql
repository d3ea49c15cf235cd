-- what each action would give in every block, from those that draft.exploration drew: tokens per forward and per second
-- Inverse-propensity weights. The error is that of a ratio of means, with blocks taken as independent: about two of them
-- either side hold 95%. "as run" is the run itself. The next block is the run's own: what an action teaches, and the
-- text that a drafter has to read after a pause, count where they occur. A block that took more than five times the
-- median of its action counts as five times: a process that waited for a core would decide the rate of a rare action.
WITH timed AS (
    SELECT
        run,
        action,
        emitted,
        seconds_decode + seconds_translate + seconds_verify AS spent,
        1 / propensity AS weight
    FROM blocks
    WHERE run IN (SELECT run FROM blocks WHERE propensity < 1) AND block > 0  -- the first one reads the prompt
),

taken AS (
    SELECT
        run,
        action,
        emitted,
        least(spent, 5 * median(spent) OVER (PARTITION BY run, action)) AS seconds,
        weight
    FROM timed
),

weighted AS (
    SELECT * FROM taken
    UNION ALL BY NAME
    SELECT run, 'as run' AS action, emitted, seconds, 1.0 AS weight FROM taken
),

rates AS (
    SELECT
        run,
        action,
        count(*) AS blocks,
        sum(weight) AS all_weight,
        sum(weight * emitted) AS all_tokens,
        sum(weight * seconds) AS all_seconds
    FROM weighted
    GROUP BY run, action
)

SELECT
    run,
    action,
    blocks,
    all_tokens / all_weight AS tokens_per_forward,
    sqrt(sum((weight * (emitted - all_tokens / all_weight)) ** 2)) / all_weight AS forward_error,
    all_tokens / all_seconds AS tokens_per_second,
    sqrt(sum((weight * (emitted - seconds * all_tokens / all_seconds)) ** 2)) / all_seconds AS second_error
FROM weighted
JOIN rates USING (run, action)
GROUP BY run, action, blocks, all_weight, all_tokens, all_seconds
ORDER BY run, tokens_per_second DESC;
