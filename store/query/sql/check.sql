-- decisions whose outcome or order contradicts their own row; no rows if there is no contradiction
WITH ratios AS (
    -- min(1, target / drafter) per level in double precision; a target probability of 0 is never accepted, nor is a
    -- drafter probability of 0, NaN or infinity, from which nothing can be sampled
    SELECT
        *,
        list_transform(
            list_zip(target_levels, drafter_levels),
            lambda level: CASE
                WHEN level[1] <= 0 OR level[2] <= 0 OR NOT isfinite(level[2]) THEN 0.0::DOUBLE
                WHEN level[1] >= level[2] THEN 1.0::DOUBLE
                ELSE level[1]::DOUBLE / level[2]::DOUBLE
            END
        ) AS level_ratios,
        outcome IN ('accepted', 'rejected') AS judged
    FROM decisions
),

derived AS (
    SELECT
        *,
        -- multiplied from the left, as verification does
        CASE WHEN len(level_ratios) > 0 THEN list_reduce(level_ratios, lambda product, ratio: product * ratio) END
            AS acceptance_probability,
        coalesce(bool_or(outcome = 'rejected') OVER (
            PARTITION BY run, "offset", block ORDER BY index ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), false) AS after_rejection
    FROM ratios
),

emitted AS (
    SELECT
        *,
        position - lag(position, 1, -1) OVER (PARTITION BY run, "offset" ORDER BY position, seq) AS step
    FROM decisions
    WHERE emitted_id IS NOT NULL
),

problems AS (
    SELECT
        *,
        unnest(list_filter([
            CASE
                WHEN judged AND (uniform IS NULL OR len(target_levels) = 0 OR len(target_levels) <> len(drafter_levels))
                    THEN 'a judged token must have a uniform and as many target as drafter levels, at least one'
                WHEN judged AND (uniform::DOUBLE < acceptance_probability) <> (outcome = 'accepted')
                    THEN 'the outcome must be accepted exactly when the uniform is below the product of the levels'
            END,
            CASE WHEN outcome = 'accepted' AND (emitted_id IS DISTINCT FROM proposed_id OR origin IS DISTINCT FROM 'accepted')
                THEN 'an accepted token must be emitted as proposed, with origin accepted' END,
            CASE WHEN outcome = 'rejected' AND (emitted_id IS NULL OR origin IS DISTINCT FROM 'residual')
                THEN 'a rejected token must be replaced by one with origin residual' END,
            CASE WHEN outcome IN ('unjudged', 'untranslatable') AND (emitted_id IS NOT NULL OR origin IS NOT NULL)
                THEN 'an unjudged or untranslatable token must emit nothing' END,
            CASE WHEN outcome = 'undrafted' AND (emitted_id IS NULL OR origin IS DISTINCT FROM 'bonus')
                THEN 'a token that nobody drafted must be emitted with origin bonus' END,
            CASE WHEN drafter = 'lookup' AND len(list_filter(drafter_levels, lambda level: level <> 1)) > 0
                THEN 'what was copied from the text must have had probability 1' END,
            CASE WHEN after_rejection AND (judged OR origin = 'bonus')
                THEN 'nothing may be judged or added after a rejection in the same block' END
        ], lambda problem: problem IS NOT NULL)) AS problem
    FROM derived
)

SELECT run, "offset", prompt_id, block, index, position, problem, outcome, uniform, acceptance_probability, seq
FROM problems
UNION ALL
SELECT
    run, "offset", prompt_id, block, index, position,
    'positions of emitted tokens must be 0, 1, 2, ... within a prompt' AS problem,
    outcome, uniform, NULL::DOUBLE AS acceptance_probability, seq
FROM emitted
WHERE step <> 1
ORDER BY run, seq, problem;
