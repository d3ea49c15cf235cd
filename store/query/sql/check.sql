-- decisions whose outcome or order contradicts their own row or their tree; no rows if there is no contradiction
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
        outcome IN ('accepted', 'rejected') AS judged,
        run IN (FROM engine_runs) AS by_engine
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

-- candidates of trees; those with the same parent share a place
candidates AS (
    SELECT
        *,
        outcome IN ('accepted', 'rejected', 'alternative') AS judged,
        run IN (FROM engine_runs) AS by_engine,
        count(*) OVER in_place AS number,
        list(target_levels[1]::DOUBLE) OVER in_place AS probabilities,
        first_value(uniform) OVER in_place AS place_uniform,
        count(*) OVER (PARTITION BY run, "offset", block, parent, proposed_id) > 1 AS repeated
    FROM decisions
    WHERE parent IS NOT NULL
    WINDOW in_place AS (PARTITION BY run, "offset", block, parent ORDER BY index)
),

-- the candidate takes the uniforms from the sum of the probabilities before it up to the sum with its own, added from
-- the left in double precision
shares AS (
    SELECT
        *,
        list_reduce(probabilities, lambda total, probability: total + probability) AS share_end,
        CASE
            WHEN len(probabilities) = 1 THEN 0.0::DOUBLE
            ELSE list_reduce(probabilities[:-2], lambda total, probability: total + probability)
        END AS share_begin,
        share_begin <= place_uniform::DOUBLE AND place_uniform::DOUBLE < share_end AS chosen
    FROM candidates
),

places AS (
    SELECT
        run, "offset", block, parent,
        bool_or(chosen) AS any_chosen,
        count(emitted_id) AS emissions
    FROM shares
    GROUP BY run, "offset", block, parent
),

trees AS (
    SELECT
        run, "offset", block,
        min(position) FILTER (parent = -1) AS begin,
        count(*) FILTER (outcome = 'accepted') AS accepted,
        max(index) FILTER (outcome = 'accepted') AS last_accepted,
        count(*) AS size,
        count(DISTINCT index) = size AND min(index) = 0 AND max(index) = size - 1 AS whole,
        list(parent) AS parents
    FROM shares
    GROUP BY run, "offset", block
),

followed AS (
    SELECT
        shares.*,
        any_chosen,
        emissions,
        whole,
        shares.parent = -1 OR parents.outcome = 'accepted' AS place_judged,
        CASE WHEN shares.parent = -1 THEN begin ELSE parents.position + 1 END AS place_position,
        shares.parent = -1 OR parents.index IS NOT NULL AS has_parent
    FROM shares
    JOIN places USING (run, "offset", block, parent)
    JOIN trees USING (run, "offset", block)
    LEFT JOIN shares AS parents
        ON parents.run = shares.run
        AND parents."offset" = shares."offset"
        AND parents.block = shares.block
        AND parents.index = shares.parent
        AND parents.index < shares.index
),

problems AS (
    SELECT
        run, "offset", prompt_id, block, index, position, outcome, uniform, acceptance_probability, seq,
        unnest(list_filter([
            CASE
                WHEN by_engine AND uniform IS NOT NULL
                    THEN 'the random numbers of another engine are not known, so a token must have no uniform'
                WHEN by_engine AND len(target_levels) <> len(drafter_levels)
                    THEN 'a token must have as many target as drafter levels, none where the probability is not known'
                WHEN by_engine AND outcome = 'accepted' AND acceptance_probability = 0
                    THEN 'a token must not be accepted where its probability is 0'
                WHEN by_engine THEN NULL
                WHEN judged AND parent IS NULL
                    AND (uniform IS NULL OR len(target_levels) = 0 OR len(target_levels) <> len(drafter_levels))
                    THEN 'a judged token must have a uniform and as many target as drafter levels, at least one'
                WHEN judged AND parent IS NULL AND (uniform::DOUBLE < acceptance_probability) <> (outcome = 'accepted')
                    THEN 'the outcome must be accepted exactly when the uniform is below the product of the levels'
            END,
            CASE WHEN outcome = 'accepted' AND (emitted_id IS DISTINCT FROM proposed_id OR origin IS DISTINCT FROM 'accepted')
                THEN 'an accepted token must be emitted as proposed, with origin accepted' END,
            CASE WHEN outcome = 'rejected' AND (emitted_id IS NULL OR origin IS DISTINCT FROM 'residual')
                THEN 'a rejected token must be replaced by one with origin residual' END,
            CASE WHEN outcome IN ('unjudged', 'untranslatable', 'alternative') AND (emitted_id IS NOT NULL OR origin IS NOT NULL)
                THEN 'an unjudged or untranslatable token and an alternative must emit nothing' END,
            CASE WHEN outcome = 'undrafted' AND (emitted_id IS NULL OR origin IS DISTINCT FROM 'bonus')
                THEN 'a token that nobody drafted must be emitted with origin bonus' END,
            CASE WHEN drafter IN ('lookup', 'memory') AND len(list_filter(drafter_levels, lambda level: level <> 1)) > 0
                THEN 'what was copied must have had probability 1' END,
            CASE WHEN after_rejection AND (judged OR origin = 'bonus')
                THEN 'nothing may be judged or added after a rejection in the same block' END,
            CASE WHEN parent IS NULL AND (outcome = 'alternative' OR (drafter = 'memory' AND outcome <> 'undrafted'))
                THEN 'alternatives and drafts of the memory must be candidates of a tree' END,
            CASE WHEN parent IS NOT NULL AND (outcome IN ('undrafted', 'untranslatable') OR proposed_id IS NULL OR (drafter <> 'model' AND len(pieces) > 0))
                THEN 'a candidate of a tree must be a proposed target token, and a copied one has no pieces' END
        ], lambda problem: problem IS NOT NULL)) AS problem
    FROM derived
),

tree_problems AS (
    SELECT
        run, "offset", prompt_id, block, index, position, outcome, uniform,
        target_levels[1]::DOUBLE AS acceptance_probability, seq,
        unnest(list_filter([
            CASE
                WHEN NOT whole THEN 'indices of candidates must be 0, 1, 2, ... within a block'
                WHEN NOT has_parent THEN 'a candidate must follow the text or an earlier candidate of its block'
                WHEN judged <> place_judged
                    THEN 'a candidate must be judged exactly when it follows the text or an accepted candidate'
                WHEN by_engine THEN NULL  -- its candidates are chains; see the rows themselves
                WHEN judged AND (uniform IS NULL OR len(target_levels) <> 1 OR len(drafter_levels) <> 1)
                    THEN 'a judged candidate must have a uniform and one level'
                WHEN NOT judged AND uniform IS NOT NULL THEN 'a candidate that was not judged must have no uniform'
                WHEN judged AND uniform IS DISTINCT FROM place_uniform THEN 'candidates of one place must share the uniform'
                WHEN judged AND (outcome = 'accepted') <> chosen
                    THEN 'a candidate must be accepted exactly when the uniform is in its share of the place'
                WHEN judged AND (outcome = 'rejected') <> (number = 1 AND NOT any_chosen)
                    THEN 'the rejection must be that of the first candidate of a place of which none is accepted'
            END,
            CASE WHEN whole AND has_parent AND position <> place_position
                THEN 'the position of a candidate must be the one after its parent, and the same for those after the text' END,
            CASE WHEN emissions > 1 AND number = 1 THEN 'at most one candidate of a place may be emitted' END,
            CASE WHEN repeated THEN 'candidates of one place must be different tokens' END
        ], lambda problem: problem IS NOT NULL)) AS problem
    FROM followed
),

bonus_problems AS (
    SELECT
        run, "offset", prompt_id, decisions.block, index, position, outcome, uniform,
        NULL::DOUBLE AS acceptance_probability, seq,
        'a bonus must come after an accepted candidate that no other follows' AS problem
    FROM decisions
    JOIN trees USING (run, "offset", block)
    WHERE decisions.parent IS NULL
        AND whole
        AND (last_accepted IS NULL OR list_contains(parents, last_accepted) OR index <> size OR position <> begin + accepted)
)

SELECT run, "offset", prompt_id, block, index, position, problem, outcome, uniform, acceptance_probability, seq
FROM problems
UNION ALL
SELECT run, "offset", prompt_id, block, index, position, problem, outcome, uniform, acceptance_probability, seq
FROM tree_problems
UNION ALL
SELECT run, "offset", prompt_id, block, index, position, problem, outcome, uniform, acceptance_probability, seq
FROM bonus_problems
UNION ALL
SELECT
    run, "offset", prompt_id, block, index, position,
    'positions of emitted tokens must be 0, 1, 2, ... within a prompt' AS problem,
    outcome, uniform, NULL::DOUBLE AS acceptance_probability, seq
FROM emitted
WHERE step <> 1
ORDER BY run, seq, problem;
