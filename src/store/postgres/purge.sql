-- Deletes up to $2 due records that expired at least $1 microseconds ago. Locked rows are somebody's business: they are
-- skipped. The expiry is judged again under the lock, so a row that was renewed or reserved meanwhile stays; rows that
-- live longer are not locked at all.
WITH due AS MATERIALIZED (
    SELECT r.ctid AS address
    FROM
        (SELECT clock_timestamp() - $1 * interval '1 microsecond' AS edge) AS c
        CROSS JOIN LATERAL (
            SELECT ctid
            FROM onceward_record
            WHERE
                purge_after <= c.edge
                AND expires_at <= c.edge
            ORDER BY purge_after
            LIMIT $2
            FOR UPDATE SKIP LOCKED
        ) AS r
)
DELETE FROM onceward_record AS r
USING due
WHERE r.ctid = due.address
