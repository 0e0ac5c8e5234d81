{{ config(materialized='view') }}
select model, price from {{ ref('rows') }} where price > 1
